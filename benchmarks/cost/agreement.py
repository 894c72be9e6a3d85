"""Do the steps agree? Only those that do are timed."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.cost.peers import Step

FINITE_STEPS = 3
TOLERANCE = 0.003
"""The largest error of the weights' change and of the moments, relative to their norm.

Rounding in float32 makes an error of 1e-6 in the moments. It makes more in the weights:
if a gradient is as small as its rounding, Adam takes a whole step in either direction,
which was 5e-4 of the norm. A loss scale that stays in, or a missing step, makes more
than a tenth.
"""


class Check(NamedTuple):
    """How a step compares with the reference.

    Attributes:
        difference: what is different; empty if nothing is.
        first_step_seconds: the time of the first step, compilation included.
    """

    difference: str
    first_step_seconds: float


class Reference:
    """What the step without loss scaling computes, to compare others with.

    Args:
        step: a new one; it takes all its steps here.
    """

    def __init__(self, step: Step) -> None:
        self.initial = step.weights()
        self.after = []
        for count in (FINITE_STEPS, 1):
            step.run(count)
            self.after.append((step.weights(), step.moments()))

    def check(self, step: Step, scaling: bool = True) -> Check:
        """Compares a new step with the reference.

        The step takes finite steps; then, if it scales, one whose gradients are not
        finite, which must change neither weights nor moments; then a finite one.
        """
        start = time.perf_counter()
        initial = step.weights()
        step.run(1)
        first = time.perf_counter() - start
        if _changed(self.initial, initial):
            return Check("it starts with other weights", first)
        return Check(self._all_steps(step, scaling), first)

    def _all_steps(self, step: Step, scaling: bool) -> str:
        step.run(FINITE_STEPS - 1)
        if difference := self._difference(0, step):
            return f"after {FINITE_STEPS} steps {difference}"
        if scaling:
            before = [*step.weights(), *step.moments()]
            step.run(1, nonfinite=True)
            if _changed(before, [*step.weights(), *step.moments()]):
                return "a step whose gradients are not finite is not skipped"
        step.run(1)
        if difference := self._difference(1, step):
            return f"after a skipped step {difference}"
        return ""

    def _difference(self, index: int, step: Step) -> str:
        weights, moments = self.after[index]
        half = len(moments) // 2
        ours, our_moments = step.weights(), step.moments()
        changes = [b - a for a, b in zip(self.initial, weights, strict=True)]
        for what, found, expected, size in (
            ("weights", ours, weights, changes),
            ("first moments", our_moments[:half], moments[:half], moments[:half]),
            ("second moments", our_moments[half:], moments[half:], moments[half:]),
        ):
            off = _norm([a - b for a, b in zip(found, expected, strict=True)])
            # Written like this, nan counts as too much.
            if not off <= TOLERANCE * _norm(size):
                share = off / _norm(size)
                return f"the {what} are off by {share:.2g} of what they should be"
        return ""


def _norm(arrays: Sequence[np.ndarray]) -> float:
    return sum(float(np.sum(np.square(x, dtype="float64"))) for x in arrays) ** 0.5


def _changed(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> bool:
    pairs = zip(before, after, strict=True)
    return any(a.tobytes() != b.tobytes() for a, b in pairs)
