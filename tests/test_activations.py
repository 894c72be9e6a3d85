"""Activations in half precision that keep their slopes for the gradient, on JAX."""

import keras
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("a matter of XLA, as JAX calls it", allow_module_level=True)

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

import keras_mp

pytestmark = pytest.mark.usefixtures("installed")

EXACT = keras.activations.gelu
ACTIVATIONS = {
    "gelu": EXACT,
    "gelu, approximate": functools.partial(EXACT, approximate=True),
    "selu": keras.activations.selu,
}


def lowered(function, x, platform):
    gradient = jax.jit(lambda x, y: jax.vjp(function, x)[1](y))
    return gradient.trace(x, x).lower(lowering_platforms=(platform,)).as_text()


def has_slopes(activation, x, platform):
    """Whether the gradient is a product with slopes, which are computed in float32."""
    return f"tensor<{x.size}xf32>" in lowered(activation, x, platform)


def values(activation, x):
    """The activation of x, and its derivatives, as they are in a compiled program."""
    both = jax.jit(activation)(x), jax.jit(jax.vmap(jax.grad(activation)))(x)
    return np.asarray(both, "float64")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
@pytest.mark.kernels
def test_the_gradient_is_a_product_with_slopes_rounded_once(activation, dtype):
    x = jnp.linspace(-6, 6, 101, dtype=dtype)
    assert has_slopes(activation, x, "cuda") and has_slopes(activation, x, "cpu")
    found, slopes = values(activation, x)
    exactly = values(activation, x.astype("float32"))[1]
    # Rounded to the nearest. In float32, too, 1 + tanh cancels: up to 5e-6 at x = -6.
    half_an_ulp = 0.51 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(slopes, exactly, rtol=half_an_ulp, atol=5e-6)
    keras_mp.uninstall()
    if activation is not EXACT:
        np.testing.assert_array_equal(found, values(activation, x)[0])
        assert not has_slopes(activation, x, "cuda")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.kernels
def test_gelu_is_closer_to_the_truth_than_that_of_jax(dtype):
    x = jnp.linspace(-8, 8, 2001, dtype=dtype)
    wide = np.asarray(x, "float64")
    at_most = special.ndtr(wide)
    density = np.exp(-(wide**2) / 2) / np.sqrt(2 * np.pi)
    truth = wide * at_most, at_most + wide * density
    errors = abs(values(EXACT, x) - truth)
    keras_mp.uninstall()
    own = abs(values(EXACT, x) - truth)
    assert (errors[:, wide < -4] < 1e-6).all()
    for start in range(-4, 8):
        here = (start <= wide) & (wide < start + 1)
        assert (errors[:, here].max(1) <= own[:, here].max(1)).all()


@pytest.mark.kernels
def test_gelu_takes_the_cheaper_error_function_and_float32():
    x = jnp.linspace(-8, 8, 5, dtype="float16")
    program = lowered(EXACT, x, "cuda")
    assert re.findall(r"chlo.erf .*", program) and "chlo.erfc" not in program
    assert all("f32" in line for line in re.findall(r"chlo.erf .*", program))


@pytest.mark.kernels
def test_a_gelu_has_forward_and_second_derivatives():
    x = jnp.linspace(-3, 3, 25, dtype="float16")
    wide = np.asarray(x, "float64")
    second = (2 - wide**2) * np.exp(-(wide**2) / 2) / np.sqrt(2 * np.pi)
    for twice in (jax.grad(jax.grad(EXACT)), jax.jacfwd(jax.grad(EXACT))):
        np.testing.assert_allclose(jax.vmap(twice)(x), second, atol=2e-3)
    _, forward = jax.jvp(EXACT, (x,), (x,))
    expected = x * jax.vmap(jax.grad(EXACT))(x)
    np.testing.assert_allclose(forward, expected, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_float32_and_tpus_are_left_alone(activation):
    x = jnp.linspace(-6, 6, 101)
    assert not has_slopes(activation, x.astype("float16"), "tpu")
    ours = lowered(activation, x, "cuda")
    keras_mp.uninstall()
    assert lowered(activation, x, "cuda") == ours
