"""The smallest set that will do, by few questions.

QuickXplain of Junker, Preferred Explanations and Relaxations for Over-Constrained
Problems, AAAI 2004. Where more of a set never does harm, a set of k out of n is found
by about 2 k log2(n / k) + 2 k questions, and none of its members can be spared.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

Member = TypeVar("Member")


def smallest_set(
    members: Sequence[Member],
    holds: Callable[[Sequence[Member]], bool],
    decided: Callable[[int], None] = lambda count: None,
) -> list[Member]:
    """Finds a set for which `holds`, and for no part of which it does.

    Args:
        members: what to choose from; earlier ones are preferred. All of them together
            must hold.
        holds: is a set enough?
        decided: is told how many members are known to be in or out.

    Returns:
        The members of the set, in their order.
    """

    known = 0

    def know(more: int) -> None:
        nonlocal known
        known += more
        decided(known)

    def search(
        background: list[Member], tell: bool, pool: Sequence[Member]
    ) -> list[Member]:
        if tell and holds(background):
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

    if not members or holds([]):
        know(len(members))
        return []
    return search([], False, members)
