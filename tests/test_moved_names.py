"""A Keras without a name that is needed: who asks is told which, and what to do."""

import keras
import pytest
from workplace import python

import keras_mp.keras_private as private

REMOVALS = {
    "a function": (
        "del keras.src.backend.common.masking.get_keras_mask",
        "keras.src.backend.common.masking.get_keras_mask",
    ),
    "a class": (
        "del keras.src.models.functional.Functional",
        "keras.src.models.functional.Functional",
    ),
    "a method with a seam": (
        "del keras.layers.Layer.stateless_call",
        "Layer.stateless_call",
    ),
    "a method that another class defines": (
        "for c in keras.Model.__mro__:\n"
        "    if 'get_metrics_result' in vars(c):\n"
        "        del c.get_metrics_result",
        "Model.get_metrics_result",
    ),
    "a function of a public module": (
        "del keras.config.dtype_policy",
        "config.dtype_policy",
    ),
}


ASK = """
import warnings
warnings.simplefilter("error")
import keras_mp
before = keras.layers.Layer.__call__
try:
    keras_mp.set_global_policy("mixed_float16")
finally:
    assert keras.layers.Layer.__call__ is before
"""


@pytest.mark.once("Nothing depends on the backend.")
@pytest.mark.sampled(by=lambda **_: "any of them")
@pytest.mark.parametrize("removal, name", REMOVALS.values(), ids=REMOVALS)
def test_who_asks_is_told_what_keras_does_not_have_and_what_to_do(removal, name):
    done = python(f"import keras, keras.src\n{removal}\n{ASK}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: keras_mp needs {name}, which Keras {keras.__version__} does not "
        "have: run `pip install --upgrade keras_mp`, or install Keras 3.10 to "
        f"{private.NEWEST_KERAS}."
    )


GONE = {
    "dot_product_attention": "vars(keras.src.backend).get('ops', keras.src.backend).nn",
    "Layer.add_loss": "keras.layers.Layer",
    "Model.export": "next(c for c in keras.Model.__mro__ if 'export' in vars(c))",
}


@pytest.mark.once("Nothing depends on the backend.")
@pytest.mark.parametrize("operation, owner", GONE.items(), ids=GONE)
def test_an_operation_that_is_gone_is_left_out(operation, owner):
    name = operation.rpartition(".")[2]
    done = python(
        f"import keras, keras.src\ndelattr({owner}, {name!r})\n"
        "import keras_mp\nkeras_mp.set_global_policy('mixed_float16')\n"
        "print(keras.layers.Dense(2).compute_dtype)"
    )
    assert done.returncode == 0 and done.stdout.split() == ["float16"]
    assert f"goes without its repair of `{operation}`: keras" in done.stderr
