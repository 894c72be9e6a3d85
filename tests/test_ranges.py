"""Ranges against what NumPy's own float16 does."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from keras_mp.tools.diagnosis.ranges import BFLOAT16, FLOAT16, joined, range_of

floats = hnp.arrays(
    "float32",
    st.integers(1, 40),
    elements=st.floats(width=32, allow_nan=True, allow_infinity=True),
)
powers = st.integers(-30, 30).map(lambda k: 2.0**k)


@pytest.mark.filterwarnings("ignore:overflow")
@given(floats, powers)
def test_shares_are_those_of_numpys_float16(array, scale):
    found = range_of(array)
    wide = array.astype("float64") * scale
    half = wide.astype("float16")
    finite = np.isfinite(array)
    beyond = np.abs(wide) >= 65536
    assert found.overflowing(FLOAT16, scale) >= np.mean(~finite | beyond)
    assert found.overflowing(FLOAT16, scale) <= np.mean(
        ~np.isfinite(half) | (np.abs(wide) > 65504)
    )
    below = np.abs(wide) < 2.0**-25
    assert found.vanishing(FLOAT16, scale) == np.mean(below & (array != 0))
    assert np.all(half[below] == 0)
    subnormal = (np.abs(wide) < 2.0**-14) & (np.abs(wide) >= 2.0**-24)
    assert found.subnormal(FLOAT16, scale) == np.mean(subnormal)


@given(floats)
def test_every_element_is_counted_once(array):
    found = range_of(array)
    counted = found.zeros + found.nans + found.infinities + found.counts.sum()
    assert counted == found.size == array.size


@given(floats, floats)
def test_ranges_join_as_their_tensors_do(a, b):
    whole, parts = range_of(np.concatenate([a, b])), joined([range_of(a), range_of(b)])
    for name in ("size", "zeros", "nans", "infinities", "smallest", "largest"):
        assert getattr(whole, name) == getattr(parts, name)
    assert whole.histogram == parts.histogram
    np.testing.assert_allclose(whole.sums, parts.sums)


def test_exponents_are_those_of_powers_of_two():
    array = np.array([1, 1.5, 2, -0.75, 0, 65504, 2.0**-24], "float32")
    assert range_of(array).histogram == {-24: 1, -1: 1, 0: 2, 1: 1, 15: 1}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "bool"])
def test_arrays_of_any_dtype_have_a_range(dtype):
    assert range_of(np.ones((2, 3), dtype)).histogram == {0: 6}


def test_what_is_lost_is_a_share_of_the_sum():
    found = range_of(np.array([1, 2.0**-30, 2.0**-30], "float32"))
    assert found.vanishing(FLOAT16) == pytest.approx(2 / 3)
    assert found.lost(FLOAT16) == pytest.approx(2.0**-29)
    assert found.lost(FLOAT16, 2.0**6) == 0
    assert found.lost(BFLOAT16) == 0


def test_headroom_is_in_powers_of_two():
    found = range_of(np.array([1, 2.0**-20], "float32"))
    assert found.headroom(FLOAT16) == (15, 4)
    assert found.headroom(FLOAT16, 2.0**16) == (-1, 20)
    assert found.headroom(BFLOAT16) == (127, 113)


def test_of_nothing_there_is_nothing():
    empty = range_of(np.zeros((0, 3), "float32"))
    assert empty.size == 0 and empty.overflowing(FLOAT16) == 0
    assert range_of(np.zeros(3)).headroom(FLOAT16) == (0, 0)
    assert math.isclose(range_of(np.zeros(3)).lost(FLOAT16), 0)
