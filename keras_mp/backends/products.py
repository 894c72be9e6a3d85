"""Products of float32 tensors whose operands are rounded to half precision.

They are as fast as products in half precision, but sum in float32 and return float32.
The heads of models use them: within `half_operands`, each `matmul`, `einsum` and `conv`
of Keras' operations is such a product.
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
from keras_mp.backends.known import IN_USE


class HalfOperands(NamedTuple):
    """How products are computed within the scope.

    Attributes:
        dtype: the dtype of the operands, "float16" or "bfloat16".
        gradient: the dtype of the operands of the gradient's two products.
        tied: whether the weights are used elsewhere too. The sum of both gradients is
            float32, and so is that of this product, unless it would be the step's peak.
        logits: how a loss may read the head's logits: "whole"; "in chunks", if nothing
            else reads them; or "recomputed" in chunks in the backward pass, too.
        classes: whether metrics read the class of the largest logit. The loss finds it.
    """

    dtype: str
    gradient: str
    tied: bool = False
    logits: str = "whole"
    classes: bool = False


# Bytes of logits. Each further chunk of the classes costs a pass over the inputs of the
# head and saves less memory than the last: so their number grows as the square root.
ONE_CHUNK = 2**26


# More chunks of the rows would save little: the float32 logits of one in 8 take a
# quarter of the memory that all slopes take in half precision. Each chunk reads the
# whole kernel: if it has fewer rows, a GPU reads for longer than it computes.
MOST_CHUNKS, ROWS = 8, 512


# Matrix units want multiples of this number. On an H100 torch's products with 2013
# classes ran at 120 TFLOP/s, those in the blocks of a decoder at 600.
LANES = 128


def number_of_chunks(rows: int, classes: int, logits: str) -> int:
    """The number of chunks; 0 if the loss reads the logits as a whole.

    They are chunks of the rows, or of the classes if the logits are recomputed.

    Args:
        rows, classes: the shape of the logits.
        logits: as in `HalfOperands`.
    """
    size = 4 * rows * classes
    if logits == "recomputed":
        return max(1, round(math.sqrt(size / ONE_CHUNK)))
    most = min(MOST_CHUNKS, rows // ROWS)
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

# What the products of this thread get: others may trace at the same time.
_thread = threading.local()
_scopes: list[HalfOperands] = []  # Of all threads.
IN_USE.append(_scopes)


@contextlib.contextmanager
def half_operands(operands: HalfOperands) -> Iterator[None]:
    """Gives such operands to the products of this thread."""
    before = getattr(_thread, "operands", None)
    try:
        _scopes.append(operands)
        _thread.operands = operands
        yield
    finally:
        _thread.operands = before
        if operands in _scopes:  # Unless an interrupt came before.
            _scopes.remove(operands)


def in_scope() -> bool:
    """Is a model's head being called, whose products have such operands?"""
    return getattr(_thread, "operands", None) is not None


def kernels(
    product: Product, possible: Callable[[], bool], **prepare: Prepare
) -> dict[str, Wrapper]:
    """Wrappers of operations that obey `half_operands` if that is possible.

    Keys are the names of the operations. Elsewhere they do what `REPAIRS` do.
    """
    return {name: _wrapper(product, possible, each) for name, each in prepare.items()}


def _wrapper(
    product: Product | None, possible: Callable[[], bool], prepare: Prepare
) -> Wrapper:
    def wrap(original: Callable) -> Callable:
        @functools.wraps(original)
        def operation(*args: Any, **kwargs: Any) -> Any:
            operands = getattr(_thread, "operands", None)
            if operands is None or not _are_of_head(args, operands):
                return original(*args, **kwargs)
            prepared = prepare(*args, **kwargs) if product and possible() else None
            if product is None or prepared is None:
                return original(*map(_in_float32, args), **kwargs)
            *pair, run = prepared
            a, b = map(ops.convert_to_tensor, pair)
            return product(run, a, b, operands)

        return operation

    return wrap


# The products of a head in float32, whatever dtype its kernel and its input have.
REPAIRS = dict.fromkeys(
    ("matmul", "einsum", "conv"),
    _wrapper(None, lambda: False, lambda *args, **kwargs: None),
)


def _are_of_head(args: tuple, operands: HalfOperands) -> bool:
    """Do these tensors belong to the head, not to a half-precision layer in it?

    Such a layer casts all of them to its dtype. If a head does not autocast, such as
    ReversibleEmbedding, or has a bfloat16 kernel, one of them or both are half.
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
