"""Mean and variance of half-precision layers on JAX, and their gradients."""

import keras
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("a matter of XLA, as JAX calls it", allow_module_level=True)

import jax
import jax.numpy as jnp
import numpy as np
from keras import layers, ops

import keras_mp
import keras_mp.keras_private as private

AXES = (0, 1, 2)
RANDOM = np.random.default_rng(0)


def data(mean, shape=(4, 6, 6, 3)):
    x = (RANDOM.normal(size=shape) + mean).astype("float32")
    return x, RANDOM.normal(size=shape).astype("float32")


def moments(x, half=True, **options):
    with private.AutocastScope("float16" if half else "float32"):
        return ops.moments(x, AXES, **options)


@pytest.mark.parametrize("keepdims", [False, True])
def test_the_values_are_those_of_keras_to_the_bit(keepdims):
    x, _ = data(3)
    ours, own = (moments(x, half, keepdims=keepdims) for half in (True, False))
    for found, expected in zip(ours, own, strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.shape == ((1, 1, 1, 3) if keepdims else (3,))


def gradient(x, of_mean, of_variance):
    """In float64, of sum(mean * of_mean + variance * of_variance)."""
    x = x.astype("float64")
    n = x[..., 0].size
    return of_mean / n + 2 / n * (x - x.mean(AXES)) * of_variance


@pytest.mark.parametrize("mean", [0, 10, 1000])
def test_the_gradient_is_that_of_float64(mean):
    x, _ = data(mean)
    of_mean, of_variance = RANDOM.normal(size=(2, 3)).astype("float32")
    (found,) = jax.vjp(moments, x)[1]((of_mean, of_variance))
    expected = gradient(x, of_mean, of_variance)
    # Two large terms nearly cancel: as many roundings as the mean is larger than 1.
    bound = 4 * 2.0**-24 * max(mean, 1) * np.max(np.abs(expected))
    assert np.max(np.abs(found - expected)) <= bound


DERIVATIVES = {
    "jvp": lambda f, x, dx: jax.jvp(f, (x,), (dx,))[1],
    "reverse of reverse": lambda f, x, dx: jax.grad(
        lambda x: jnp.vdot(jax.grad(f)(x), dx)
    )(x),
    "forward of reverse": lambda f, x, dx: jax.jvp(jax.grad(f), (x,), (dx,))[1],
    "vmap": lambda f, x, dx: jax.vmap(jax.grad(f))(jnp.stack([x, dx])),
    "checkpoint": lambda f, x, dx: jax.grad(jax.checkpoint(f))(x),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_other_derivatives_are_those_of_keras(derivative):
    x, dx = data(1)

    def squares(half):
        return lambda x: sum(jnp.sum(y**2) for y in moments(x, half))

    found, expected = (derivative(squares(half), x, dx) for half in (True, False))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
@pytest.mark.kernels
def test_batch_normalization_in_half_precision_has_it_and_float32_has_not(policy):
    x, _ = data(1)
    with keras_mp.policy_scope(policy):
        model = keras.Sequential([layers.BatchNormalization(), layers.Flatten()])
    model.build(x.shape)
    state = (
        [v.value for v in model.trainable_variables],
        [v.value for v in model.non_trainable_variables],
    )
    step = jax.make_jaxpr(lambda x: model.stateless_call(*state, x, training=True))
    assert ("name=_mean_and_variance" in str(step(x))) == (policy != "float32")
