"""From a call of the user's to its effect a value passes few files of ours.

Counted as a program runs: the files of keras_mp whose functions run, and their calls.
"""

import collections
import gc
import pathlib
import sys

import keras
import numpy as np
import pytest
from backends import BACKEND
from keras import layers, ops

import keras_mp
from keras_mp.backends import known
from keras_mp.policies.policy import ChoosingPolicy

FOLDER = f"{pathlib.Path(keras_mp.__file__).parent}/"
X = np.ones((4, 8), "float32")
# At most so many files, and calls, on each backend. On torch numbers and seeds pass
# files of their own.
MOST = {
    "first call": {"jax": (23, 320), "tensorflow": (24, 350), "torch": (24, 360)},
    "second call": {"jax": (5, 14), "tensorflow": (6, 20), "torch": (4, 12)},
    "compile": {"jax": (28, 240), "tensorflow": (28, 240), "torch": (30, 280)},
    "apply": {"jax": (10, 105), "tensorflow": (13, 128), "torch": (13, 130)},
}


class Two(keras.Model):
    """A model without a graph, of two layers."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(8)
        self.head = layers.Dense(4, activation="softmax")

    def call(self, x):
        return self.head(self.hidden(x))


def first_call():
    Two()(X)  # What is asked of a class is asked once.
    model = Two()
    return lambda: model(X), None


def second_call():
    model = Two()
    model(X)
    return lambda: model(X), None


def compiling():
    def model():
        head = layers.Dense(4, activation="softmax")
        return keras.Sequential([keras.Input((8,)), layers.Dense(8), head])

    how = "adam", "sparse_categorical_crossentropy"
    model().compile(*how)
    second = model()
    return lambda: second.compile(*how), None


def applying():
    """Until the update of the inner optimizer, which is Keras'."""
    optimizer = keras_mp.LossScaleOptimizer("adam")
    variables = [keras.Variable(np.ones((4, 4), "float32")) for _ in range(3)]
    optimizer.build(variables)

    def step():
        optimizer.scale_loss(ops.ones(()))
        optimizer.apply([ops.ones((4, 4))] * 3, variables)

    step()
    optimizer.scale_loss(ops.ones(()))
    grads = [ops.ones((4, 4))] * 3
    return lambda: optimizer.apply(grads, variables), optimizer.inner_optimizer


WAYS = {
    "first call": first_call,
    "second call": second_call,
    "compile": compiling,
    "apply": applying,
}


def files_of(run, last=None):
    """How often functions of each file run, until Keras' own update by `last`."""
    found, ended = collections.Counter(), False

    def look(frame, event, argument):
        nonlocal ended
        code = frame.f_code
        if ended or event != "call":
            return
        is_update = "update_step" in code.co_name and last is not None
        ended = is_update and frame.f_locals.get("self") is last
        if code.co_filename.startswith(FOLDER) and not ended:
            found[code.co_filename.removeprefix(FOLDER)] += 1

    gc.collect()  # What is remembered of the layers of other tests goes now.
    gc.disable()
    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


@pytest.fixture(autouse=True)
def nothing_of_other_tests(monkeypatch):
    """A policy that goes by paths, and logits that the trace of a failed step holds."""
    monkeypatch.setattr(ChoosingPolicy, "paths_matter", False)
    for facts in known.IN_USE:
        facts.clear()


@pytest.mark.kernels
@pytest.mark.parametrize("way", WAYS)
def test_few_files_are_on_the_way(way, mixed_float16):
    found = files_of(*WAYS[way]())
    files, calls = MOST[way][BACKEND]
    assert len(found) <= files, found
    assert found.total() <= calls, found


def test_what_nobody_uses_is_not_on_the_way(mixed_float16):
    found = set().union(*(files_of(*way()) for way in WAYS.values()))
    unused = {
        "rounding/lost.py",
        "rounding/scope.py",
        "callbacks/loss_scale_monitor.py",
    }
    unused |= {"sharding.py"} if BACKEND != "torch" else set()
    assert not found & unused
