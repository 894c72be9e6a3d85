"""How gradients are reduced to codes: together, as integers, and in two parts.

XLA on CPUs first writes a copy of a tensor that it reduces along more than 32 elements,
and reads the copy. So a part of an axis is reduced first, and the rest afterwards.
"""

from collections.abc import Sequence

# Gradients up to this many elements are checked together, so that the number of
# kernels does not grow with the number of variables.
GROUPED_ELEMENTS = 64 * 1024
# Read as integers, the bits of |x| keep its order: infinity is above all numbers, nan
# above infinity. An integer maximum, unlike one of floats, cannot lose a nan.
ALL_BUT_SIGN = 0x7FFFFFFF
LARGEST_NUMBER = 0x7F7FFFFF
PART = 32


def split_axis(shape: Sequence[int], first: int) -> tuple[list[int], int] | None:
    """How to reduce a part of an axis; None if no long axis can be split.

    Args:
        shape: the shape of a tensor.
        first: the first axis that may be reduced.

    Returns:
        (the shape with that axis split in two, the axis to reduce in it).
    """
    for axis, length in enumerate(shape):
        divisor = max(d for d in range(1, PART + 1) if length % d == 0)
        if axis >= first and length > PART and divisor > 1:
            split = [*shape[:axis], length // divisor, divisor, *shape[axis + 1 :]]
            return split, axis + 1
    return None
