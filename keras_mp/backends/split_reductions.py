"""Reductions in two parts, for XLA on CPUs.

XLA writes a copy of a tensor that it reduces along more than 32 elements, to read the
copy again. So a part of an axis is reduced first, and the rest of it afterwards.
"""

from collections.abc import Sequence

PART = 32


def split_axis(shape: Sequence[int], first: int = 0) -> tuple[list[int], int] | None:
    """How to reduce a part of an axis; None if no axis is long, or can be split.

    Args:
        shape: of a tensor.
        first: the first axis that may be reduced.

    Returns:
        (the same elements in a shape with one axis more, the axis to reduce there).
    """
    for axis, length in enumerate(shape):
        divisor = max(d for d in range(1, PART + 1) if length % d == 0)
        if axis >= first and length > PART and divisor > 1:
            split = [*shape[:axis], length // divisor, divisor, *shape[axis + 1 :]]
            return split, axis + 1
    return None
