"""A Keras without a name that keras_mp needs: the import says which, and what to do."""

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
    "a module that has two places": (
        "vars(keras.src.backend).pop('nn', None)\n"
        "vars(vars(keras.src.backend).get('ops', keras)).pop('nn', None)",
        "keras.src.backend.ops.nn or keras.src.backend.nn",
    ),
    "a method with a seam": (
        "del keras.layers.Layer.add_loss",
        "Layer.add_loss",
    ),
    "a method that another class defines": (
        "for c in keras.Model.__mro__:\n"
        "    if 'get_metrics_result' in vars(c):\n"
        "        del c.get_metrics_result",
        "Model.get_metrics_result",
    ),
    "a function of a public module": (
        "del keras.config.dtype_policy",
        f"{keras.config.__name__}.dtype_policy",
    ),
    "an operation that is repaired": (
        "del vars(keras.src.backend).get('ops', keras.src.backend).nn"
        ".dot_product_attention",
        f"{private.backend_core.__name__}.dot_product_attention",
    ),
}


@pytest.mark.once("The import ends before a backend is asked anything.")
@pytest.mark.sampled(by=lambda **_: "any of them")
@pytest.mark.parametrize("removal, name", REMOVALS.values(), ids=REMOVALS)
def test_the_import_names_what_keras_does_not_have_and_what_to_do(removal, name):
    done = python(f"import keras, keras.src\n{removal}\nimport keras_mp\n")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: keras_mp needs {name}, which Keras {keras.__version__} does not "
        "have: run `pip install --upgrade keras_mp`, or install Keras 3.10 to "
        f"{private.NEWEST_KERAS}."
    )
