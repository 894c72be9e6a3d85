"""Stochastic rounding to bfloat16: one of two neighbours, unbiased, uncorrelated."""

import keras
import ml_dtypes
import numpy as np
import pytest
from backends import BACKEND, COMPILED

from keras_mp.backends import engine
from keras_mp.backends.rounding import RandomBits, Words

BFLOAT16 = ml_dtypes.bfloat16
MANY = 1 << 16
SIGMAS = 5


def compiled(function, how):
    if not how:
        return function
    if BACKEND == "jax":
        import jax

        return jax.jit(function)
    import tensorflow as tf

    return tf.function(function, jit_compile=how == "xla")


def rounded(*arrays, seed=1, step=2, how=False):
    """Arrays rounded within one step, float32 again: those of bfloat16 fit."""

    def round_all(*tensors):
        round_ = engine.stochastic_rounding(seed, step)
        return [keras.ops.cast(round_(x), "float32") for x in tensors]

    tensors = [keras.ops.convert_to_tensor(np.asarray(x, "float32")) for x in arrays]
    results = compiled(round_all, how)(*tensors)
    return [keras.ops.convert_to_numpy(x) for x in results]


def neighbours(x):
    """The largest number of bfloat16 that is not above x, and the lowest not below."""
    bits = np.asarray(x, "float32").view(np.uint32)
    towards_zero = (bits & np.uint32(0xFFFF0000)).view(np.float32)
    away = ((bits & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(np.float32)
    away = np.where(towards_zero == x, x, away)
    return np.minimum(towards_zero, away), np.maximum(towards_zero, away)


def random_numbers(number):
    """Numbers of all sizes, subnormal ones and the largest among them."""
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 2**32, number, dtype=np.uint32)
    x = bits.view(np.float32)
    return x[np.isfinite(x)]


@pytest.mark.parametrize("how", COMPILED)
def test_a_number_becomes_one_of_its_neighbours(how):
    x = random_numbers(MANY)
    (y,) = rounded(x, how=how)
    low, high = neighbours(x)
    assert np.all((y == low) | (y == high))
    # Each of them, and not always the nearer one.
    inner = low < high
    assert np.any(y[inner] == low[inner]) and np.any(y[inner] == high[inner])


@pytest.mark.parametrize("how", COMPILED)
def test_what_bfloat16_holds_stays_to_the_bit(how):
    x = np.arange(2**16, dtype=np.uint16).view(BFLOAT16).astype("float32")
    x = x[~np.isnan(x)]
    (y,) = rounded(x, how=how)
    np.testing.assert_array_equal(y.view(np.uint32), x.view(np.uint32))


@pytest.mark.parametrize("how", COMPILED)
def test_nan_stays_nan(how):
    # The sum with the noise would make others of the last ones.
    bits = [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF]
    x = np.repeat(np.array(bits, np.uint32), 1000).view(np.float32)
    assert np.all(np.isnan(rounded(x, how=how)[0]))


def test_the_mean_is_the_number_itself():
    share = np.linspace(0.0, 1.0, 17)[:, np.newaxis]
    for scale in (1.0, -1.0, 2.0**-130, 3e38):
        low, step = np.float32(scale), np.float32(scale) * np.float32(2.0**-7)
        low = low.astype(BFLOAT16).astype("float32")
        step = neighbours(low * np.float32(1 + 2.0**-12))
        step = step[1] - step[0] if scale > 0 else step[0] - step[1]
        x = np.broadcast_to(low + share * step, (17, MANY)).astype("float32")
        up = (rounded(x)[0] - low) / step
        exact = (x[:, 0].astype("float64") - low) / step
        error = np.sqrt(exact * (1 - exact) / MANY)
        assert np.all(np.abs(up.mean(axis=1) - exact) <= SIGMAS * error)


def coins(shape, **options):
    """Where a number between two neighbours is rounded up, 1; down, -1."""
    x = np.full(shape, 1 + 2.0**-8, "float32")  # In the middle.
    return [np.where(y > 1, 1.0, -1.0) for y in rounded(x, x, **options)]


def assert_uncorrelated(a, b):
    assert abs(np.mean(a * b)) <= SIGMAS / np.sqrt(a.size)


@pytest.mark.parametrize("shape", [(256, 256), (MANY,), (3, 3, 64, 128)], ids=str)
def test_steps_seeds_variables_and_neighbours_are_uncorrelated(shape):
    first, second = coins(shape, seed=1, step=1)
    assert_uncorrelated(first, second)  # Two writes of a step.
    for other in (
        {"seed": 1, "step": 2},
        {"seed": 2, "step": 1},
        {"seed": 0, "step": 1},
    ):
        for coin in coins(shape, **other):
            assert_uncorrelated(first, coin)
            assert_uncorrelated(second, coin)
    for axis in range(len(shape)):
        for distance in (1, 2):
            assert_uncorrelated(first, np.roll(first, distance, axis))


def test_steps_of_one_number_are_uncorrelated():
    x = np.full(64, 1 + 2.0**-8, "float32")
    coin = np.stack([rounded(x, step=s)[0] > 1 for s in range(300)]) * 2.0 - 1
    assert_uncorrelated(coin[1:], coin[:-1])
    assert abs(coin.mean()) <= SIGMAS / np.sqrt(coin.size)


@pytest.mark.parametrize("how", COMPILED)
def test_the_same_seed_and_step_have_the_same_bits(how):
    x = np.full((33, 7), 1 + 2.0**-8, "float32")
    again = rounded(x, x, how=how), rounded(x, x)
    for a, b in zip(*again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.any(again[0][0] != again[0][1])


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (1, 1, 5)], ids=str)
def test_any_shape(shape):
    (y,) = rounded(np.ones(shape))
    assert y.shape == shape and np.all(y == 1)


NUMPY = Words(
    word=lambda x: np.asarray(x).astype(np.uint32),
    xor=np.bitwise_xor,
    shift=lambda x, bits: x >> np.uint32(bits),
    numbers=lambda shape, axis: np.indices(shape, np.uint32)[axis],
)


@pytest.mark.skipif(BACKEND == "torch", reason="its bits come from a generator")
def test_the_bits_are_those_of_numpy():
    x = np.random.default_rng(0).standard_normal((6, 5, 4)).astype("float32")
    with np.errstate(over="ignore"):
        random = RandomBits(NUMPY, 7, 9)
        for y in rounded(x, x, seed=7, step=9):
            sums = x.view(np.uint32) + (random.next(x.shape) & np.uint32(0xFFFF))
            expected = (sums & np.uint32(0xFFFF0000)).view(np.float32)
            np.testing.assert_array_equal(y, expected)
