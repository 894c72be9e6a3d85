"""The confidence interval of a mean of paired differences."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t with 1, 2, ... degrees of freedom: 95 % lie within plus or minus this."""


class Interval(NamedTuple):
    """The mean of differences, and how far it may be off with 95 % confidence."""

    mean: float
    half_width: float

    def holds(self, value: float) -> bool:
        """Whether a value lies within it."""
        return abs(value - self.mean) <= self.half_width


def paired(base: Sequence[float | None], other: Sequence[float | None]) -> (
    Interval | None
):  # fmt: skip
    """The interval of `other - base`, of pairs with the same seed.

    Args:
        base, other: a number of each seed, in the same order.

    Returns:
        None if one of them is missing or not finite, or there are less than two or
        more than ten.

    Source: Student 1908, "The probable error of a mean".
    """
    differences = [
        b - a
        for a, b in zip(base, other, strict=True)
        if a is not None and b is not None and math.isfinite(a) and math.isfinite(b)
    ]
    freedom = len(differences) - 1
    if len(differences) < len(base) or not 1 <= freedom <= len(T95):
        return None
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return Interval(statistics.fmean(differences), T95[freedom - 1] * error)
