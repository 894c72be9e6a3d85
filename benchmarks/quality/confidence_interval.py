"""The confidence interval of a mean of paired differences."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t for 1, 2, ... degrees of freedom: 95 % lie between -t and t."""


class Interval(NamedTuple):
    """A mean, and the half width of its 95 % confidence interval."""

    mean: float
    half_width: float

    def holds(self, value: float) -> bool:
        """Whether a value lies in the interval."""
        return abs(value - self.mean) <= self.half_width


def confidence_interval(
    base: Sequence[float | None], other: Sequence[float | None]
) -> Interval | None:
    """The 95 % confidence interval of the mean of `other - base`, seed by seed.

    Args:
        base, other: a number for each seed, in the same order.

    Returns:
        None if a number is missing or not finite, or there are fewer than two pairs or
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
