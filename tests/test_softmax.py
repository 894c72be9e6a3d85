"""Softmax of half-precision tensors on JAX: float32 inside."""

import re

import keras
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("a matter of XLA, as JAX calls it", allow_module_level=True)

import jax
import jax.numpy as jnp
import numpy as np
from keras import ops

pytestmark = pytest.mark.usefixtures("installed")

LOGITS = np.random.default_rng(0).normal(size=(3, 4, 64)).astype("float32") * 4
COTANGENT = np.random.default_rng(1).normal(size=LOGITS.shape).astype("float32")
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
half = pytest.mark.parametrize("dtype", ROUNDOFF)


def as_float64(x):
    return np.asarray(x, "float32").astype("float64")


@half
@pytest.mark.parametrize("axis", [-1, 1])
def test_values_and_gradients_are_those_of_float64_but_for_rounding(dtype, axis):
    x, g = (jnp.asarray(a, dtype) for a in (LOGITS, COTANGENT))
    y, pullback = jax.vjp(lambda x: ops.softmax(x, axis), x)
    (dx,) = pullback(g)
    weights = np.exp(as_float64(x) - as_float64(x).max(axis, keepdims=True))
    weights /= weights.sum(axis, keepdims=True)
    mean = (weights * as_float64(g)).sum(axis, keepdims=True)
    expected = weights * (as_float64(g) - mean)
    assert y.dtype == dx.dtype == dtype
    # One rounding of each probability; of the gradient two more.
    bound = ROUNDOFF[dtype] * weights + 2.0**-25
    assert np.all(np.abs(as_float64(y) - weights) <= bound)
    error = np.abs(as_float64(dx) - expected)
    assert np.max(error) <= 3 * ROUNDOFF[dtype] * np.max(np.abs(expected))


@half
def test_it_is_float32_inside(dtype):
    x = jnp.asarray(LOGITS, dtype)
    program = str(jax.make_jaxpr(ops.softmax)(x))
    assert re.findall(r":(\w+)\[[\d,]*\] = exp", program) == ["f32"]


@half
def test_other_derivatives_are_there(dtype):
    x, dx = (jnp.asarray(a, dtype) for a in (LOGITS, COTANGENT))

    def second(x):
        return jnp.sum(jax.grad(lambda x: jnp.sum(ops.softmax(x) ** 2))(x) * dx)

    for value in (
        jax.jvp(ops.softmax, (x,), (dx,))[1],
        jax.grad(second)(x),
        jax.vmap(ops.softmax)(x),
        jax.grad(jax.checkpoint(lambda x: jnp.sum(ops.softmax(x) ** 2)))(x),
    ):
        assert value.dtype == dtype and np.isfinite(as_float64(value)).all()
