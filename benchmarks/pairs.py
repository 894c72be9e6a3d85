"""Timing in pairs: how many times as long as the base does each of the others take?

A pair is a stretch of steps of the base and one of another, right after each other, in
random order: what else goes on in the machine hits both. The device is waited for at
the end of a stretch, and at no step within.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

STRETCH = 0.03
"""Seconds that a stretch of the base takes at least, if a step is shorter."""
MIN_PAIRS, MAX_PAIRS = 7, 200
CONTROL = "control"
OFF = 0.03
"""How far the control's median may be from 1."""


class Quartiles(NamedTuple):
    """The median of so many numbers and the quartiles round it."""

    median: float
    lower: float
    upper: float
    number: int


class Timing(NamedTuple):
    """What came of the pairs of one that was held against the base.

    Attributes:
        ratio: of the times of a pair, the other's over the base's.
        seconds: that a step of the other takes.
        base_seconds: that a step of the base takes.
    """

    ratio: Quartiles
    seconds: Quartiles
    base_seconds: Quartiles


def quartiles(numbers: Sequence[float]) -> Quartiles:
    """Of one number, that number is all three."""
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
    tell: Callable[[float], object] = lambda part: None,
) -> dict[str, Timing]:
    """Times a base against others, each in as many pairs as its share of time allows.

    Args:
        base: takes so many steps, and waits for the last of them. Warmed up.
        others: the same, by name; a second copy of the base among them is the control.
        seconds: how long to measure. What is slow takes longer: `MIN_PAIRS` pairs each.
        clock: tells the time, in seconds.
        seed: of the random order.
        tell: is told how much of it is done, from 0 to 1.
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
            tell(min(1.0, sum(spent.values()) / seconds) if seconds else 1.0)
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
