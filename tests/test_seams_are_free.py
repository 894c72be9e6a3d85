"""The seams cost next to nothing: counted, not timed."""

import gc
import sys

import keras
import pytest
from test_layering import in_a_fresh_interpreter

import keras_mp

HEAVY = ("keras_mp.diagnostics", "keras_mp.callbacks.overflow_breakpoint")


def test_importing_keras_mp_loads_no_diagnostics():
    # They are half of all modules, and of the time.
    loaded = in_a_fresh_interpreter(
        "import json, sys, keras_mp\n"
        "print(json.dumps([n for n in sys.modules if n.startswith('keras_mp.')]))\n"
    )
    assert [name for name in loaded if name.startswith(HEAVY)] == []


def test_it_loads_nothing_that_keras_does_not_load_beside_its_own_modules():
    loaded = in_a_fresh_interpreter(
        "import json, sys, keras\n"
        "before = set(sys.modules)\n"
        "import keras_mp\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))\n"
    )
    assert [name for name in loaded if name.split(".")[0] != "keras_mp"] == []


@pytest.mark.parametrize("module", [keras_mp, keras_mp.callbacks])
def test_every_public_name_is_there_and_listed(module):
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert getattr(module, name).__name__ in (name, f"keras_mp.{name}")
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        module.nonsense  # noqa: B018


def calls_of(function):
    """The names of the Python functions that a call of `function` runs."""
    names = []

    def profile(frame, event, argument):
        if event == "call":
            names.append(frame.f_code.co_qualname)

    gc.disable()  # Others have functions called at each collection.
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return names


def layers():
    x = keras.ops.ones((2, 4))
    identity, dense = keras.layers.Identity(), keras.layers.Dense(4)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    return {
        "Identity": (lambda: identity(x), 1),
        # Two layers: the model itself, and the one within.
        "Sequential": (lambda: model(x), 2),
        "Dense": (lambda: dense(x), 1),
    }


@pytest.mark.parametrize("name", ["Identity", "Dense", "Sequential"])
def test_a_layer_call_costs_one_python_call_more(name):
    call, number = layers()[name]
    call(), call()
    with_seams = calls_of(call)
    keras_mp.integration.uninstall()  # The fixture of all tests installs them again.
    call()
    added = len(with_seams) - len(calls_of(call))
    adds = name != "Identity" and keras.backend.backend() != "torch"
    assert with_seams.count("_layer_call.<locals>.__call__") == number
    # The sum of kernel and bias goes through another seam, of two calls.
    assert added <= number + 2 * adds
