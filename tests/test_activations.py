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


def kept(activation, x):
    """The arrays that the gradient of an activation needs."""
    _, gradient = jax.vjp(activation, x)
    return [a for a in jax.tree.leaves(gradient) if a.size == x.size]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_only_the_input_is_kept_and_nothing_else_changes(activation, dtype):
    x = jnp.linspace(-6, 6, 101, dtype=dtype)
    (only,) = kept(activation, x)
    assert only.dtype == x.dtype and (only == x).all()
    values = activation(x), jax.vmap(jax.grad(activation))(x)
    keras_mp.seams.uninstall()
    assert len(kept(activation, x)) > 1
    for value, own in zip(
        values, (activation(x), jax.vmap(jax.grad(activation))(x)), strict=True
    ):
        np.testing.assert_array_equal(value, own)


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_float32_is_left_alone(activation):
    x = jnp.linspace(-6, 6, 101)
    recomputes = [
        any("policy" in e.params for e in jax.make_jaxpr(activation)(x).eqns)
        for x in (x, x.astype("float16"))
    ]
    assert recomputes == [False, True]
