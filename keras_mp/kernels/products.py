"""Products of float32 tensors whose operands are rounded to half precision.

They are as fast as products in half precision, but sum in float32 and return float32.
The heads of models use them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

from keras import ops

from keras_mp.backends.interface import Wrapper
from keras_mp.repairs.products import HalfOperands, of_heads

# Bytes of logits. Each further chunk of the classes costs a pass over the inputs of the
# head and saves less memory than the last: so their number grows as the square root.
ONE_CHUNK = 2**26


# More chunks of the rows would save little: the float32 logits of one in 8 take a
# quarter of the memory that all slopes take in half precision. Large ones are halved:
# a step of 32,768 rows takes 0.88 to 0.95 of the memory in 16 chunks, and at most 1.1 %
# longer (`make sweep-chunks`, with 8 and with 16).
CHUNKS, MOST_CHUNKS = 8, 16
LARGE_CHUNK = 2**28  # Bytes.


# Matrix units want multiples of this number. On an H100 torch's products with 2013
# classes ran at 120 TFLOP/s, those in the blocks of a decoder at 600.
LANES = 128


def number_of_chunks(rows: int, classes: int, logits: str, least: int) -> int:
    """The number of chunks; 0 if the loss reads the logits as a whole.

    They are chunks of the rows, or of the classes if the logits are recomputed.

    Args:
        rows, classes: the shape of the logits.
        logits: as in `HalfOperands`.
        least: how many rows a chunk has at least. Each chunk reads the whole kernel: on
            an H100 it computes rows / 295 times as long as it reads.
    """
    size = 4 * rows * classes
    if logits == "recomputed":
        return max(1, round(math.sqrt(size / ONE_CHUNK)))
    most = min(max(CHUNKS, size // LARGE_CHUNK), MOST_CHUNKS, rows // least)
    if logits == "whole" or size < 2 * ONE_CHUNK or most < 2:
        return 0
    numbers = range(most, most // 2, -1)
    return next((number for number in numbers if rows % number == 0), most)


def size_of_chunk(classes: int, number: int) -> int:
    """How many classes each of `number` chunks has; the last one may have fewer."""
    return LANES * -(-classes // (LANES * number))


# A product of two float32 tensors, as `product(run, a, b, half_operands)`. On JAX
# `run(a, b, dtype)` multiplies tensors of any dtype and returns `dtype`. Elsewhere a
# and b are matrices, and `run` shapes their product.
Product = Callable[[Callable, Any, Any, HalfOperands], Any]
# Takes an operation's arguments; returns its two operands and `run`, or None if it has
# no such product.
Prepare = Callable[..., tuple[Any, Any, Callable] | None]


def kernels(
    product: Product, possible: Callable[[], bool], **prepare: Prepare
) -> dict[str, Wrapper]:
    """Wrappers of operations that obey `half_operands` if that is possible.

    Keys are the names of the operations. Elsewhere they do what the repairs do.
    """

    def wrapper(prepare: Prepare) -> Wrapper:
        def faster(operands: HalfOperands, *args: Any, **kwargs: Any) -> Any:
            prepared = prepare(*args, **kwargs) if possible() else None
            if prepared is None:
                return None
            *pair, run = prepared
            a, b = map(ops.convert_to_tensor, pair)
            return product(run, a, b, operands)

        return functools.partial(of_heads, faster=faster)

    return {name: wrapper(each) for name, each in prepare.items()}
