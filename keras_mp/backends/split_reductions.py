"""Reductions in parts, for XLA on CPUs.

It would write a copy of all that it reduces along more than 32 elements, to read it
again. So a part of an axis is reduced first, and then what is left of it.
"""

from collections.abc import Sequence

PART = 32


def split_axis(shape: Sequence[int], first: int = 0) -> tuple[list[int], int] | None:
    """How to reduce a part of an axis; None where no axis is long, or has parts.

    Args:
        shape: of a tensor.
        first: the first axis that may be reduced.

    Returns:
        (the same elements in a shape with one axis more, the axis to reduce there).
    """
    for axis, length in enumerate(shape):
        divisor = max(d for d in range(1, PART + 1) if length % d == 0)
        if axis >= first and length > PART and divisor > 1:
            parted = [*shape[:axis], length // divisor, divisor, *shape[axis + 1 :]]
            return parted, axis + 1
    return None
