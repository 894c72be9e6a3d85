"""`make sweep-models` has measured every model; what fails here alone says why.

It writes `sweeps/models.json`: what all architectures of keras.applications, and models
of KerasHub, do under our policies on JAX and TensorFlow.
"""

import itertools
import json

import keras
import pytest
from workplace import ROOT

from sweeps.model_cases import cases
from sweeps.models import BACKENDS, POLICIES
from sweeps.models_report import LEFT, PLAIN

pytestmark = pytest.mark.once("It reads files of the repository.")

ROWS = {
    (row["model"], row["backend"], row["policy"], row["how"]): row["outcome"]
    for row in json.loads((ROOT / "sweeps" / "models.json").read_text())["rows"]
}


def test_every_architecture_of_keras_applications_was_measured():
    exported = [name for name in dir(keras.applications) if name[0].isupper()]
    models = {model for model, *_ in ROWS}
    assert {f"applications/{name}" for name in exported} <= models


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_each_model_was_measured_in_every_way(case):
    ways = itertools.product([case.name], BACKENDS, POLICIES, PLAIN)
    assert all(way in ROWS for way in ways)


def test_what_fails_fails_in_plain_keras_too_or_says_why():
    failed = [row for row in ROWS if row[-1] in PLAIN and ROWS[row] != "ok"]
    ours = [row for row in failed if ROWS[*row[:-1], PLAIN[row[-1]]] == "ok"]
    assert {(model, how) for model, _, _, how in ours} == set(LEFT)
