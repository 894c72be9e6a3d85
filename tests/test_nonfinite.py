"""Which gradients are not finite: exactly, whatever their shapes and numbers."""

import contextlib
from unittest import mock

import keras
import numpy as np
import pytest
from backends import BACKEND, COMPILED, same_bits, stateful_step, tensors, values

import keras_mp
from keras_mp.backends import engine
from keras_mp.backends.step import FINITE, INFINITE, NAN

RNG = np.random.default_rng(0)
# Checked alone, or with others of their shape; prime lengths; no elements at all.
SHAPES = [(), (1,), (3,), (8, 8), (40,), (37, 5), (64, 33), (0, 4), (300, 300)]
NEGATIVE_NAN = np.array(0xFFC00000, "uint32").view("float32")


def compiled(function, xla=True):
    if BACKEND == "jax":
        import jax

        return jax.jit(function)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(function, jit_compile=xla)
    return function


def codes_of(arrays):
    """The codes of gradients of one shape, which no way to compile changes."""
    ways = [compiled(engine.nonfinite)]
    if BACKEND == "tensorflow":
        ways.append(compiled(engine.nonfinite, xla=False))
    if BACKEND == "jax":
        ways.append(compiled(as_on_a_gpu))
    codes = [keras.ops.convert_to_numpy(way(tensors(arrays))) for way in ways]
    for others in codes[1:]:
        np.testing.assert_array_equal(codes[0], others)
    return codes[0]


def as_on_a_gpu(grads):
    from keras_mp.backends.jax import step

    with mock.patch.object(step, "_largest", step._largest_at_once):
        return step._codes(grads)


def code_of(array):
    return NAN if np.isnan(array).any() else INFINITE if np.isinf(array).any() else 0


@pytest.mark.parametrize("number", [1, 2, 7, 16, 33])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.sampled
def test_one_value_among_many_is_found_and_named(shape, number):
    arrays = [RNG.normal(size=shape).astype("float32") for _ in range(number)]
    arrays = [np.array(a) for a in arrays]
    bad = [np.inf, -np.inf, np.nan, NEGATIVE_NAN, np.finfo("float32").max]
    for index, value in zip(RNG.permutation(number), bad, strict=False):
        if arrays[index].size:
            arrays[index].flat[RNG.integers(arrays[index].size)] = value
    np.testing.assert_array_equal(codes_of(arrays), [code_of(a) for a in arrays])


@pytest.mark.parametrize("number", [1, 3])
def test_in_float64_what_float32_cannot_hold_is_finite(number):
    with x64():
        for value in (1e300, -np.inf, np.nan):
            arrays = [np.ones(3) for _ in range(number)]
            arrays[-1][1] = value
            np.testing.assert_array_equal(
                codes_of(arrays), [code_of(a) for a in arrays]
            )


def x64():
    """Where JAX keeps float64."""
    if BACKEND == "jax":
        import jax

        return jax.enable_x64(True)
    return contextlib.nullcontext()


def test_a_nan_outweighs_an_infinity():
    arrays = [np.array([np.nan, np.inf, 1.0], "float32"), np.ones(3, "float32")]
    np.testing.assert_array_equal(codes_of(arrays), [NAN, FINITE])


def test_a_nan_that_is_the_square_of_another_is_seen():
    # XLA leaves out the `abs` of a square, and the sign of a nan would stay.
    @compiled
    def codes(x):
        return engine.nonfinite([keras.ops.square(x), keras.ops.abs(x)])

    x = keras.ops.convert_to_tensor(np.array([1.0, NEGATIVE_NAN], "float32"))
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(codes(x)), [NAN, NAN])


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize(
    "grad", [1e25, 2e19 / 1.9], ids=["each square", "the sum of the squares"]
)
def test_a_norm_that_overflows_skips_the_step_that_keras_would_fill_with_nan(
    grad, compiled
):
    variables = [keras.Variable(np.ones(4, "float32"))]
    before = values(variables)
    optimizer = keras_mp.LossScaleOptimizer(
        keras.optimizers.Adam(global_clipnorm=1.0), initial_scale=1.0
    )
    step = stateful_step(optimizer, variables, compiled)
    optimizer.scale_loss(1.0)
    with pytest.warns(UserWarning, match="whatever the loss scale"):
        step([np.full(4, grad, "float32")])
        optimizer.raise_if_diverged()
    assert int(optimizer.skipped_steps) == 1
    assert same_bits(before, values(variables))
    optimizer.scale_loss(1.0)
    step([np.full(4, 1e15, "float32")])
    assert int(optimizer.iterations) == 1
    assert np.isfinite(values(variables)[0]).all()


@pytest.mark.parametrize(
    "xla", COMPILED if BACKEND == "tensorflow" else [False], ids=str
)
def test_a_norm_of_some_variables_that_overflows_skips_the_step(xla):
    variables = [keras.Variable(np.ones(4, "float32")) for _ in range(3)]
    before = values(variables)
    optimizer = keras_mp.LossScaleOptimizer(
        keras.optimizers.SGD(global_clipnorm=1.0), initial_scale=1.0
    )
    optimizer.build(variables)
    step = stateful_step(optimizer, variables[1:], xla)
    optimizer.scale_loss(1.0)
    with pytest.warns(UserWarning, match="whatever the loss scale"):
        step([np.full(4, 8e18, "float32")] * 2)
        optimizer.raise_if_diverged()
    assert int(optimizer.skipped_steps) == 1
    assert same_bits(before, values(variables))
    assert optimizer.nonfinite_report() == []
