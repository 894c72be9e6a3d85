"""`arange` in float16, compiled."""

import keras
import numpy as np
import pytest
from backends import BACKEND
from keras import ops

import keras_mp  # noqa: F401 (puts the seams in)

pytestmark = pytest.mark.usefixtures("installed")


def compiled(function):
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(function)
    if BACKEND == "jax":
        import jax

        return jax.jit(function)
    return function


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32", None])
@pytest.mark.parametrize("arguments", [(5,), (2, 9), (1, 9, 3)])
def test_numbers_in_a_row(arguments, dtype):
    found = compiled(lambda: ops.arange(*arguments, dtype=dtype))()
    assert keras.backend.standardize_dtype(found.dtype) == (dtype or "int32")
    found = ops.convert_to_numpy(ops.cast(found, "float32"))
    np.testing.assert_array_equal(found, np.arange(*arguments))


def test_the_bounds_may_be_tensors_of_float16():
    stop = ops.convert_to_tensor(3.0, "float16")
    found = compiled(lambda: ops.arange(0.0, stop, dtype="float16"))()
    np.testing.assert_array_equal(ops.convert_to_numpy(found), [0, 1, 2])
