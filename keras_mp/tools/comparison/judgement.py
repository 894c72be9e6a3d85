"""Does a policy change a metric, or is it chance? Student's t says.

Arithmetic on the final numbers of trainings. Trainings of one seed are compared with
each other: they have the same initial weights and the same batches.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from keras_mp.errors import MissingPackageError, missing_package, needed

CONFIDENCE = 0.95

SAME = "the same"
DIFFERS = "differs"
UNCLEAR = "no clear difference"
ONE_SEED = "no verdict: one seed"
NO_SCIPY = "no verdict: no scipy"
NOTHING = "nothing to compare"

NEEDS_SCIPY = str(missing_package("A verdict", "scipy"))


class Difference(NamedTuple):
    """How much a number differs from the base's, and what that means.

    Attributes:
        mean: of the differences over the seeds; nan if there are none.
        half_width: of the 95 % confidence interval round the mean. None with fewer than
            two seeds, or without scipy.
        verdict: SAME, DIFFERS, UNCLEAR, ONE_SEED, NO_SCIPY or NOTHING.
        of_seeds: the differences.
    """

    mean: float
    half_width: float | None
    verdict: str
    of_seeds: tuple[float, ...] = ()

    @property
    def interval(self) -> tuple[float, float]:
        """Where the mean over all seeds lies, with a confidence of 95 %."""
        half_width = math.nan if self.half_width is None else self.half_width
        return self.mean - half_width, self.mean + half_width


def difference(
    base: Sequence[float | None], other: Sequence[float | None]
) -> Difference:
    """Judges the differences between numbers of the same seeds.

        all are 0                                             -> the same
        there is only one                                     -> no verdict
        0 is outside the 95 % confidence interval of the mean -> differs
        else                                                  -> no clear difference

    Pairs of which one is None or not finite are left out.

    Source: Student 1908, "The probable error of a mean".
    """
    differences = tuple(
        b - a
        for a, b in zip(base, other, strict=True)
        if a is not None and b is not None and math.isfinite(a) and math.isfinite(b)
    )
    if not differences:
        return Difference(math.nan, None, NOTHING)
    mean, half_width, verdict = statistics.fmean(differences), None, ONE_SEED
    if len(differences) > 1:
        try:
            half_width = _half_width(differences)
            verdict = DIFFERS if abs(mean) > half_width else UNCLEAR
        except MissingPackageError:
            verdict = NO_SCIPY
    if not any(differences):
        verdict = SAME
    return Difference(mean, half_width, verdict, differences)


def _half_width(differences: Sequence[float]) -> float:
    with needed("A verdict", "scipy"):
        from scipy import stats
    # `ttest_rel` warns of differences that are all the same, which is no fault here.
    t = stats.t.ppf((1 + CONFIDENCE) / 2, len(differences) - 1)
    return float(t * stats.sem(differences))


def spread_of(numbers: Sequence[float]) -> float | None:
    """The sample standard deviation of the finite numbers; None of fewer than two."""
    finite = [x for x in numbers if math.isfinite(x)]
    return statistics.stdev(finite) if len(finite) > 1 else None


class Ratio(NamedTuple):
    """A multiple of the base: the median over the seeds, and the range."""

    median: float
    lowest: float
    highest: float

    def text(self, unit: str) -> str:
        """Such as "2.04 times as fast (1.89 to 2.20)", with "times as fast"."""
        median, low, high = (f"{x:.2f}" for x in self)
        return f"{median} {unit}" + (f" ({low} to {high})" if low != high else "")


def ratio(base: Sequence[float | None], other: Sequence[float | None]) -> Ratio | None:
    """The ratios of what was measured with the same seeds; None if nothing was."""
    ratios = [b / a for a, b in zip(base, other, strict=True) if a and b]
    if not ratios:
        return None
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))
