"""GELU in half precision that keeps its slopes for the gradient, on TensorFlow."""

import keras
import numpy as np
import pytest
from backends import BACKEND

if BACKEND != "tensorflow":
    pytest.skip("a matter of XLA, as TensorFlow calls it", allow_module_level=True)

import tensorflow as tf
from scipy import special

import keras_mp

pytestmark = pytest.mark.usefixtures("installed")

APPROXIMATE = [False, True]
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


def values(approximate, x, jit_compile=True):
    """GELU of x, its derivatives, and the second ones."""

    @tf.function(jit_compile=jit_compile)
    def run(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = keras.activations.gelu(x, approximate)
            slope = tape.gradient(y, x)
        return y, slope, outer.gradient(slope, x)

    return np.asarray([tf.cast(found, "float64") for found in run(x)])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("approximate", APPROXIMATE)
@pytest.mark.kernels
def test_slopes_are_rounded_once(approximate, dtype):
    x = tf.cast(tf.linspace(-6.0, 6.0, 101), dtype)
    found = values(approximate, x)
    exactly = values(approximate, tf.cast(x, "float32"), jit_compile=False)
    # Rounded to the nearest. In float32, too, 1 + tanh cancels: up to 5e-6 at x = -6.
    half_an_ulp = 0.51 * EPS[dtype]
    np.testing.assert_allclose(found[1], exactly[1], rtol=half_an_ulp, atol=5e-6)
    np.testing.assert_allclose(found[2], exactly[2], rtol=0, atol=8 * EPS[dtype])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.kernels
def test_exact_gelu_is_rounded_once(dtype):
    x = tf.cast(tf.linspace(-6.0, 6.0, 101), dtype)
    wide = np.asarray(tf.cast(x, "float64"))
    exactly = wide * special.ndtr(wide)
    found, _, _ = values(False, x)
    np.testing.assert_allclose(found, exactly, rtol=0.51 * EPS[dtype], atol=1e-5)


def kept(approximate, x, jit_compile):
    """Does the gradient multiply by slopes that were computed in float32?"""

    @tf.function(jit_compile=jit_compile)
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = keras.activations.gelu(x, approximate)
        return tape.gradient(y, x)

    nodes = run.get_concrete_function(x).graph.get_operations()
    factors = [n.inputs[0] for n in nodes if n.type == "Mul"]
    slopes = [f.op.inputs[0] for f in factors if f.op.type == "Cast"]
    return any(f.dtype == tf.float32 and f.shape == x.shape for f in slopes)


@pytest.mark.parametrize("approximate", APPROXIMATE)
@pytest.mark.kernels
def test_only_in_half_precision_and_where_xla_compiles(approximate):
    half, wide = tf.ones(3, "float16"), tf.ones(3)
    assert kept(approximate, half, True)
    assert not kept(approximate, half, False) and not kept(approximate, wide, True)
    keras_mp.uninstall()
    assert not kept(approximate, half, True)
