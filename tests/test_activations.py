"""Activations in half precision whose gradient keeps their input alone, on JAX."""

import keras
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("a matter of XLA, as JAX calls it", allow_module_level=True)

import functools

import jax
import jax.numpy as jnp
import numpy as np

import keras_mp
from keras_mp.backends.jax.activations import NAMES

ACTIVATIONS = {name: getattr(keras.activations, name) for name in NAMES} | {
    "gelu, approximate": functools.partial(keras.activations.gelu, approximate=True)
}


def recomputes(activation, x, platform):
    """Whether the backward pass computes once more what lies behind a barrier."""
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(activation(x)).astype("float32")))
    program = gradient.trace(x).lower(lowering_platforms=(platform,))
    return "optimization_barrier" in program.as_text()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_the_backward_pass_starts_from_the_input_and_nothing_else_changes(
    activation, dtype
):
    x = jnp.linspace(-6, 6, 101, dtype=dtype)
    assert recomputes(activation, x, "cuda") and recomputes(activation, x, "cpu")
    assert not recomputes(activation, x, "tpu")  # Which loses by it.
    values = activation(x), jax.vmap(jax.grad(activation))(x)
    keras_mp.seams.uninstall()
    assert not recomputes(activation, x, "cuda")
    for value, own in zip(
        values, (activation(x), jax.vmap(jax.grad(activation))(x)), strict=True
    ):
        np.testing.assert_array_equal(value, own)


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_float32_is_left_alone(activation):
    assert not recomputes(activation, jnp.linspace(-6, 6, 101), "cuda")
