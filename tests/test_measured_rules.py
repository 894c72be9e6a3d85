"""The table of rules is what the measurements say: no more and no less.

`make sweep-layers` writes `sweeps/layers.json`: what every layer of Keras does in half
precision under Keras' own policies ("stock") and under ours.
"""

import json

import keras
import pytest

import keras_mp
from keras_mp.policies.choosing import decision_for
from keras_mp.policies.stock_rules import RULES
from sweeps import layer_table, layers
from sweeps.layer_cases import cases
from sweeps.layer_errors import built

BACKEND = keras.backend.backend()
MEASURED = json.loads(layer_table.RESULTS.read_text())
# Mended where the product, or the sum of a gradient, is made, and not by a rule: see
# test_attention.py and test_broadcasting.py.
MENDED = {"MultiHeadAttention", "GroupQueryAttention", "Conv2D"}


def failures(backend, policies):
    """(case, dtype, how it was run) of all that is not what it is in float32."""
    return [
        (name, dtype, way)
        for name, measured in MEASURED[backend]["cases"].items()
        if measured != layer_table.OK
        for dtype, by_policies in measured.items()
        for way, outcome in by_policies[policies].items()
        if outcome["status"] != "ok"
    ]


@pytest.fixture(scope="module")
def rules_of_failures():
    """For each case that fails under stock policies the rule that keeps its layer."""
    failing = {name for name, _, _ in failures(BACKEND, "stock")}
    return {
        case.name: decision_for(built(case, keras_mp.MixedFloat16())).rule
        for case in cases(BACKEND)
        if case.name in failing
    }


@pytest.mark.parametrize("backend", MEASURED)
def test_nothing_that_was_measured_fails_under_our_policies(backend):
    assert failures(backend, "ours") == []


@pytest.mark.parametrize("backend", MEASURED)
def test_enough_layer_classes_were_measured(backend):
    classes = {name.split(",")[0] for name in MEASURED[backend]["cases"]}
    assert len(classes) >= 57


@pytest.mark.once("It reads a table.")
def test_the_file_has_a_case_a_line():
    text = layer_table.RESULTS.read_text()
    assert layers.as_text(MEASURED) == text
    number = sum(len(measured["cases"]) for measured in MEASURED.values())
    assert number < len(text.splitlines()) < number + 20


@pytest.mark.once("It reads a table.")
def test_the_readme_of_the_sweeps_has_the_table_of_the_file():
    readme = layer_table.RESULTS.with_name("README.md").read_text()
    assert layer_table.rendered(MEASURED).strip() in readme


@pytest.mark.filterwarnings("ignore")  # What layers say of hard inputs is not ours.
def test_every_layer_that_fails_in_half_precision_has_a_rule(rules_of_failures):
    without = {name for name, rule in rules_of_failures.items() if rule is None}
    assert {name for name in without if name.split(",")[0] not in MENDED} == set()


@pytest.mark.filterwarnings("ignore")
def test_every_measured_rule_keeps_a_layer_that_fails(rules_of_failures):
    measured = {
        rule.name
        for rule in RULES
        if rule.source == "sweeps/README.md" and BACKEND in rule.backends
    }
    told = {rule.name for rule in rules_of_failures.values() if rule is not None}
    assert measured - told == set()
