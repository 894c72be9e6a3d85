"""`keras.ops.normalize` in half precision, where its epsilon is no number."""

import keras
import numpy as np
import pytest
from backends import POLICIES, dtype_of
from keras import layers, ops

import keras_mp
from keras_mp.backends.differentiation import differentiate

pytestmark = pytest.mark.usefixtures("installed")

DRAWN = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")
INPUTS = {"usual": 1.0, "small": 1e-3, "tiny": 1e-6, "large": 300.0, "zeros": 0.0}
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def normalized(x, dtype, order):
    """The result, and the gradient of a sum of it by x."""
    weights = ops.arange(8, dtype="float32")
    variable = keras.Variable(x)
    results = []

    def loss(_, see):
        result = ops.normalize(ops.cast(variable.value, dtype), order=order)
        results.append(dtype_of(result))
        return ops.sum(ops.cast(see(result)[0], "float32") * weights)

    found = differentiate(loss, (), [variable], [variable], compiled=True)
    assert set(results) == {dtype}
    return found.seen[0], found.by_variable[0]


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("scale", INPUTS)
@pytest.mark.parametrize("half", POLICIES)
@pytest.mark.sampled
def test_it_computes_what_float32_computes(half, scale, order):
    dtype = POLICIES[half]
    x = ops.cast(DRAWN * INPUTS[scale], dtype)
    x = ops.convert_to_numpy(ops.cast(x, "float32"))
    for found, wanted in zip(
        normalized(x, dtype, order), normalized(x, "float32", order), strict=True
    ):
        most = {"float16": 65504.0, "bfloat16": 3e38}[dtype]
        if np.max(np.abs(wanted)) < most:
            error = 2 * UNIT_ROUNDOFF[dtype] * np.max(np.abs(wanted))
            np.testing.assert_allclose(found, wanted, rtol=0, atol=error)


@pytest.mark.parametrize("half", POLICIES)
def test_a_model_that_normalizes_skips_no_step(half):
    class Cosine(layers.Layer):
        def call(self, x):
            return ops.normalize(x) + ops.normalize(ops.zeros_like(x))

    keras_mp.set_global_policy(half)
    model = keras.Sequential([layers.Dense(8), Cosine(), layers.Dense(1)])
    model.compile("adam", "mse")
    x = np.repeat(DRAWN, 4, axis=0)
    model.fit(x, x[:, :1], batch_size=4, epochs=5, verbose=0)
    assert int(model.optimizer.iterations) == 20
    if half == "mixed_float16":
        assert int(model.optimizer.skipped_steps) == 0
