"""The products of a model's heads: their results are float32.

Within `half_operands` each `matmul`, `einsum` and `conv` of Keras' operations is such a
product. It is of float32 operands, unless a kernel multiplies half-precision ones.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
from keras import ops

import keras_mp.keras_private as private
from keras_mp.backends.interface import HALF
from keras_mp.backends.known import IN_USE
from keras_mp.types import Tensor


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


def _nothing(operands: HalfOperands, *args: Any, **kwargs: Any) -> None:
    return None


def of_heads(original: Callable, faster: Callable[..., Any] = _nothing) -> Callable:
    """Wraps an operation: called by a head, it computes in float32.

    Args:
        faster: `faster(operands, *args, **kwargs)` computes it in another way, or
            returns None.
    """

    @functools.wraps(original)
    def operation(*args: Any, **kwargs: Any) -> Any:
        operands = getattr(_thread, "operands", None)
        if operands is None or not _are_of_head(args, operands):
            return original(*args, **kwargs)
        result = faster(operands, *args, **kwargs)
        if result is None:
            result = original(*map(_in_float32, args), **kwargs)
        return result

    return operation


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


def _in_float32(x: Tensor) -> Any:
    is_half = hasattr(x, "dtype") and _dtype(x) in HALF
    return ops.cast(x, "float32") if is_half else x


def _dtype(x: Tensor) -> str:
    if isinstance(x, keras.Variable):
        return private.dtype_when_read(x)
    return keras.backend.standardize_dtype(x.dtype)
