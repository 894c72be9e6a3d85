"""Do steps agree? Asked before anything is timed."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from keras_mp.benchmarks.steps import Step

FINITE_STEPS = 3
TOLERANCE = 0.003
"""Of the change of the weights, and of the moments, as norms over the whole model.

Rounding in float32 makes 1e-6 of the moments. Of the weights it makes more: where a
gradient is as small as its rounding, Adam takes a whole step in either direction, which
was 5e-4 of the norm. A scale that was not taken out again, or a step too few, is above
a tenth.
"""


State = tuple[Sequence[np.ndarray], Sequence[np.ndarray]]
"""Weights and moments."""


class Walk(NamedTuple):
    """What a new step comes to: finite steps, one that is not finite, a finite one.

    Attributes:
        first_step_seconds: what the first step took, with what had to be compiled.
        initial: the weights before it.
        finite: the state after `FINITE_STEPS`.
        skips: whether the step whose gradients were not finite left it as it was.
        after: the state after one more finite step.
    """

    first_step_seconds: float
    initial: Sequence[np.ndarray]
    finite: State
    skips: bool
    after: State


def walk(step: Step, scaling: bool = True) -> Walk:
    """Leads a new step along; gradients are finite all the way if it does not scale."""
    initial = step.weights()
    start = time.perf_counter()
    step.run(1)
    first = time.perf_counter() - start
    step.run(FINITE_STEPS - 1)
    finite = step.weights(), step.moments()
    skips = True
    if scaling:
        step.run(1, poisoned=True)
        skips = not _changed(
            [*finite[0], *finite[1]], [*step.weights(), *step.moments()]
        )
    step.run(1)
    return Walk(first, initial, finite, skips, (step.weights(), step.moments()))


def complaint(found: Walk, reference: Walk) -> str:
    """What is different from the reference, which does not scale; empty if nothing."""
    if _changed(reference.initial, found.initial):
        return "it starts with other weights"
    if off := _difference(found.finite, reference.finite, reference.initial):
        return f"after {FINITE_STEPS} steps {off}"
    if not found.skips:
        return "a step whose gradients are not finite is not skipped"
    if off := _difference(found.after, reference.after, reference.initial):
        return f"after a skipped step {off}"
    return ""


def _difference(found: State, reference: State, initial: Sequence[np.ndarray]) -> str:
    (ours, our_moments), (weights, moments) = found, reference
    half = len(moments) // 2
    changes = [b - a for a, b in zip(initial, weights, strict=True)]
    for what, of_it, expected, size in (
        ("weights", ours, weights, changes),
        ("first moments", our_moments[:half], moments[:half], moments[:half]),
        ("second moments", our_moments[half:], moments[half:], moments[half:]),
    ):
        off = _norm([a - b for a, b in zip(of_it, expected, strict=True)])
        # Written so that nan is too much.
        if not off <= TOLERANCE * _norm(size):
            share = off / _norm(size)
            return f"the {what} are off by {share:.2g} of what they should be"
    return ""


def _norm(arrays: Sequence[np.ndarray]) -> float:
    return sum(float(np.sum(np.square(x, dtype="float64"))) for x in arrays) ** 0.5


def _changed(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> bool:
    pairs = zip(before, after, strict=True)
    return any(a.tobytes() != b.tobytes() for a, b in pairs)
