"""Products of float32 tensors whose operands are rounded to half precision.

They are as fast as products in half precision, and what they return is float32, summed
in float32. For the heads of models: within `half_operands`, each `matmul`, `einsum` and
`conv` of Keras' operations is such a product.
"""

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
from keras import ops

import keras_mp.keras_private as private
from keras_mp.backends.interface import HALF, Wrapper


class HalfOperands(NamedTuple):
    """How products are computed within the scope.

    Attributes:
        dtype: of the operands, "float16" or "bfloat16".
        gradient: of the operands of the two products of their gradient.
        tied: whether the weights are used elsewhere too. The sum of both gradients is
            float32, and so is the one of this product.
        logits: how a loss may read what the product makes of a head: "whole"; "in
            chunks" of the classes, if nothing else reads it; or "recomputed" in chunks
            in the backward pass, too.
        classes: whether metrics read which of them is the largest. The loss finds it.
    """

    dtype: str
    gradient: str
    tied: bool = False
    logits: str = "whole"
    classes: bool = False


# Bytes of logits. A chunk more costs a pass over the inputs of the head, and what is
# there at a time gets smaller by ever less: so the number grows as the square root.
# A decoder on an H100 with 0.82 and 3.3 GB of logits, compiled and read, in 2, 4 and 8
# chunks: 2.00, 1.96, 1.85 times float32's speed in 0.685, 0.655, 0.641 of its memory;
# and in 4, 7 and 13: 2.17, 2.13, 2.04 in 0.548, 0.535, 0.525.
ONE_CHUNK = 2**26


# Matrix units want multiples of so many. On an H100 torch's products with 2013 classes
# ran at 120 TFLOP/s, those of the blocks of a decoder at 600.
LANES = 128


# The width of a head's inputs up to which half of the logits are computed again, if
# metrics read classes. On an H100, compiled and read with this limit moved, in chunks
# and as a whole, over float32: GPT-2, 768 wide, 1.58 in 0.75 and 1.62 in 1.03; but of
# 2048, Llama 1.71 in 0.67 and 1.85 in 0.73, Gemma 1.45 in 0.92 and 1.61 in 1.11.
NARROW = 1024


def number_of_chunks(size: int, width: int, logits: str, classes: bool) -> int:
    """Of logits of so many bytes; 0 if the loss reads them as a whole.

    Args:
        size: what float32 logits take.
        width: of the inputs of the head.
        logits, classes: as in `HalfOperands`.
    """
    number = round(math.sqrt(size / ONE_CHUNK))
    if logits == "recomputed":
        return max(1, number)
    is_wide = classes and width > NARROW
    return number if logits == "in chunks" and number > 1 and not is_wide else 0


def size_of_chunk(classes: int, number: int) -> int:
    """Of how many classes one of so many chunks is; the last one may be smaller."""
    return LANES * -(-classes // (LANES * number))


def number_recomputed(number: int, logits: str, classes: bool) -> int:
    """How many of so many chunks the backward pass computes again.

    If metrics read classes it is half of them: then what is kept takes what logits in
    half precision would.
    """
    if logits == "recomputed":
        return number
    return (number + 1) // 2 if classes and number > 1 else 0


# A product of two float32 tensors, as `product(run, a, b, half_operands)`. On JAX
# `run(a, b, dtype)` multiplies tensors of any dtype and returns `dtype`. Elsewhere a
# and b are matrices, and `run` shapes their product.
Product = Callable[[Callable, Any, Any, HalfOperands], Any]
# Of the arguments of an operation: its two operands and `run`; None if it has no such
# product.
Prepare = Callable[..., tuple[Any, Any, Callable] | None]

_thread = threading.local()


@contextlib.contextmanager
def half_operands(operands: HalfOperands) -> Iterator[None]:
    """Lets the products of this thread have such operands."""
    before = getattr(_thread, "operands", None)
    _thread.operands = operands
    try:
        yield
    finally:
        _thread.operands = before


def in_scope() -> bool:
    """Is the head of a model being called, whose products have such operands?"""
    return getattr(_thread, "operands", None) is not None


def repairs(
    product: Product, possible: Callable[[], bool], **prepare: Prepare
) -> dict[str, Wrapper]:
    """Wrappers of operations that obey `half_operands` where that is possible.

    Each by the name of its operation.
    """
    return {name: _wrapper(product, possible, each) for name, each in prepare.items()}


def _wrapper(
    product: Product, possible: Callable[[], bool], prepare: Prepare
) -> Wrapper:
    def wrap(original: Callable) -> Callable:
        @functools.wraps(original)
        def operation(*args: Any, **kwargs: Any) -> Any:
            operands = getattr(_thread, "operands", None)
            if operands is None or not _are_of_head(args, operands):
                return original(*args, **kwargs)
            prepared = prepare(*args, **kwargs) if possible() else None
            if prepared is None:
                return original(*map(_in_float32, args), **kwargs)
            *pair, run = prepared
            a, b = map(ops.convert_to_tensor, pair)
            return product(run, a, b, operands)

        return operation

    return wrap


def _are_of_head(args: tuple, operands: HalfOperands) -> bool:
    """Are these tensors of the head itself, and of no half-precision layer within it?

    Such a layer casts all to its dtype. Where a head does not autocast, such as
    ReversibleEmbedding, or its kernel is bfloat16, one of them is half or both are.
    """
    dtypes = {_dtype(x) for x in args if hasattr(x, "dtype")}
    if dtypes == {operands.dtype}:
        layer = private.layer_in_call()
        return layer is not None and not layer.autocast
    return dtypes <= {"float32", operands.dtype}


def _in_float32(x: Any) -> Any:
    is_half = hasattr(x, "dtype") and _dtype(x) in HALF
    return ops.cast(x, "float32") if is_half else x


def _dtype(x: Any) -> str:
    if isinstance(x, keras.Variable):
        return private.dtype_when_read(x)
    return keras.backend.standardize_dtype(x.dtype)
