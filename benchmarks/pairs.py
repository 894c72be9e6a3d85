"""Timing in pairs: the time of each of the others over the time of the base.

A pair is a stretch of steps of the base and one of another, right after each other, in
random order, so that a disturbance of the machine hits both. We wait for the device
only at the end of a stretch.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

STRETCH = 0.03
"""The least seconds of a stretch of the base, if a step is shorter."""
MIN_PAIRS, MAX_PAIRS = 7, 200
CONTROL = "control"
OFF = 0.03
"""How far the control's median may be from 1."""


class Quartiles(NamedTuple):
    """The median of some numbers, the quartiles below and above it, and how many."""

    median: float
    lower: float
    upper: float
    number: int


class Timing(NamedTuple):
    """The times of one of the others and of the base, from their pairs.

    Attributes:
        ratio: the other's time over the base's, pair by pair.
        seconds: for a step of the other.
        base_seconds: for a step of the base.
    """

    ratio: Quartiles
    seconds: Quartiles
    base_seconds: Quartiles


def quartiles(numbers: Sequence[float]) -> Quartiles:
    """The quartiles of some numbers; one number is its own median and quartiles."""
    if len(numbers) == 1:
        return Quartiles(numbers[0], numbers[0], numbers[0], 1)
    lower, median, upper = statistics.quantiles(numbers, method="inclusive")
    return Quartiles(median, lower, upper, len(numbers))


def is_conclusive(control: Quartiles) -> bool:
    """Whether a second copy of the base takes as long as the base, within `OFF`."""
    return abs(control.median - 1) <= OFF


def time_in_pairs(
    base: Callable[[int], object],
    others: Mapping[str, Callable[[int], object]],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    seed: int = 0,
    progress: Callable[[float], object] = lambda part: None,
) -> dict[str, Timing]:
    """Times a base against others, each in as many pairs as its share of time allows.

    Args:
        base: takes a number of steps and waits for the last one. Already warm.
        others: name -> the same; a second copy of the base among them is the control.
        seconds: how long to measure; slow ones take longer, for `MIN_PAIRS` pairs each.
        clock: returns the time, in seconds.
        seed: of the random order.
        progress: takes the share that is done, from 0 to 1.
    """
    order = random.Random(seed)

    def timed(run: Callable[[int], object], steps: int) -> float:
        start = clock()
        run(steps)
        return (clock() - start) / steps

    one = timed(base, 1)
    if one < STRETCH:
        one = min(one, timed(base, 1), timed(base, 1))
    steps = max(1, round(STRETCH / one)) if one > 0 else 1
    share = seconds / max(len(others), 1)
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in others}
    spent = dict.fromkeys(others, 0.0)
    waiting = list(others)
    while waiting:
        order.shuffle(waiting)
        for name in waiting:
            start = clock()
            both = [(0, base), (1, others[name])]
            order.shuffle(both)
            times = {which: timed(run, steps) for which, run in both}
            pairs[name].append((times[0], times[1]))
            spent[name] += clock() - start
            progress(min(1.0, sum(spent.values()) / seconds) if seconds else 1.0)
        waiting = [
            name
            for name in waiting
            if len(pairs[name]) < MIN_PAIRS
            or (spent[name] < share and len(pairs[name]) < MAX_PAIRS)
        ]
    return {
        name: Timing(
            quartiles([other / base for base, other in found]),
            quartiles([other for _, other in found]),
            quartiles([base for base, _ in found]),
        )
        for name, found in pairs.items()
    }
