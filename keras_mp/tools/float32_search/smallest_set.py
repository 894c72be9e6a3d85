"""The smallest set that is enough, found with few questions.

QuickXplain of Junker, Preferred Explanations and Relaxations for Over-Constrained
Problems, AAAI 2004. If a larger set is never worse, it finds a set of k out of n
with about 2 k log2(n / k) + 2 k questions, and none of its members can be left out.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Member = TypeVar("Member")


def smallest_set(
    members: Sequence[Member],
    is_enough: Callable[[Sequence[Member]], bool],
    decided: Callable[[int], None] = lambda count: None,
) -> list[Member]:
    """Finds a set that is enough, while no part of it is.

    Args:
        members: what to choose from; earlier ones are preferred. All of them together
            must be enough.
        is_enough: is a set enough?
        decided: is called with the number of members that are known to be in or out.

    Returns:
        The members of the set, in their order.
    """
    known = 0

    def know(more: int) -> None:
        nonlocal known
        known += more
        decided(known)

    def search(
        background: list[Member], ask: bool, pool: Sequence[Member]
    ) -> list[Member]:
        if ask and is_enough(background):
            know(len(pool))
            return []
        if len(pool) == 1:
            know(1)
            return list(pool)
        half = len(pool) // 2
        first, second = list(pool[:half]), list(pool[half:])
        of_second = search(background + first, True, second)
        of_first = search(background + of_second, bool(of_second), first)
        return of_first + of_second

    if not members or is_enough([]):
        know(len(members))
        return []
    return search([], False, members)


@dataclasses.dataclass(frozen=True)
class Unit:
    """A layer that may be in float32, with all that it holds."""

    path: str
    parts: tuple["Unit", ...]  # Within it; some of them may be enough instead.


def smallest_units(
    units: Sequence[Unit],
    is_enough: Callable[[Iterable[Unit]], bool],
    decided: Callable[[int], None],
) -> list[Unit]:
    """Finds a small set of units that is enough, and prefers parts to whole units.

    See `smallest_set`; all units together are enough.
    """
    found = smallest_set(units, is_enough, decided)
    if not is_enough(found):
        found = list(units)  # A larger set was worse.
    for unit in list(found):
        without = [other for other in found if other != unit]
        if is_enough(without):
            found = without
    waiting = list(found)
    while waiting:
        unit = waiting.pop()
        others = [other for other in found if other != unit]

        def is_enough_instead(
            parts: Iterable[Unit], others: list[Unit] = others
        ) -> bool:
            return is_enough([*others, *parts])

        if unit.parts and is_enough_instead(unit.parts):
            parts = smallest_set(unit.parts, is_enough_instead)
            if is_enough_instead(parts):
                found = [*others, *parts]
                waiting += parts
    return found
