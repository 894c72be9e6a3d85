"""Is a difference larger than what another seed makes?

Arithmetic on the final numbers of trainings. Trainings of one seed are compared with
each other: they have the same initial weights and the same batches.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

SAME = "the same"
WITHIN = "within the spread"
BEYOND = "beyond the spread"
UNCLEAR = "unclear: seeds disagree"
NO_SPREAD = "no spread: one seed"
NOTHING = "nothing to compare"


class Difference(NamedTuple):
    """How much a number differs from the base's, and what that means.

    Attributes:
        mean: of the differences over the seeds; nan if there are none.
        spread: the sample standard deviation of the base over the seeds: what another
            seed changes. None with fewer than two seeds.
        verdict: SAME, WITHIN, BEYOND, UNCLEAR, NO_SPREAD or NOTHING.
    """

    mean: float
    spread: float | None
    verdict: str


def difference(base: Sequence[float], other: Sequence[float]) -> Difference:
    """Judges the differences between numbers of the same seeds.

        all are 0                                  -> the same
        there is only one                          -> no spread to judge by
        their mean <= the spread of the base       -> within the spread
        all have the same sign                     -> beyond the spread
        otherwise                                  -> unclear

    By chance alone it is "beyond" in two of five cases with 2 seeds, in one of five
    with 3, in one of twenty with 5 and hardly ever with 10. Pairs that are not finite
    are left out.
    """
    pairs = [
        (a, b)
        for a, b in zip(base, other, strict=True)
        if math.isfinite(a) and math.isfinite(b)
    ]
    differences = [b - a for a, b in pairs]
    if not differences:
        return Difference(math.nan, None, NOTHING)
    mean, spread = statistics.fmean(differences), spread_of([a for a, _ in pairs])
    if not any(differences):
        verdict = SAME
    elif spread is None:
        verdict = NO_SPREAD
    elif abs(mean) <= spread:
        verdict = WITHIN
    elif min(differences) > 0 or max(differences) < 0:
        verdict = BEYOND
    else:
        verdict = UNCLEAR
    return Difference(mean, spread, verdict)


def spread_of(numbers: Sequence[float]) -> float | None:
    """The sample standard deviation of the finite numbers; None of fewer than two."""
    finite = [x for x in numbers if math.isfinite(x)]
    return statistics.stdev(finite) if len(finite) > 1 else None


class Ratio(NamedTuple):
    """A multiple of the base: the median over the seeds, and the range."""

    median: float
    lowest: float
    highest: float

    def __str__(self) -> str:
        median, low, high = (f"{x:.2f}x" for x in self)
        return median + (f" ({low} to {high})" if low != high else "")


def ratio(base: Sequence[float | None], other: Sequence[float | None]) -> Ratio | None:
    """The ratios of what was measured with the same seeds; None if nothing was."""
    ratios = [b / a for a, b in zip(base, other, strict=True) if a and b]
    if not ratios:
        return None
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))
