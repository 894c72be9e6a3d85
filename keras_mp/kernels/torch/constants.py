"""Python numbers become tensors where they are needed, without a wait for the device.

Keras makes them on the host and copies them to the device, and such a copy waits until
all that was launched before has run. Filling a tensor is a kernel like any other.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import torch
from keras import ops

_FLOATS = ("float16", "bfloat16", "float32", "float64")
# The largest number of each dtype that is filled in. What lies beyond, Keras' own way
# rounds to infinity, and filling makes an error of it.
_LARGEST: dict[str, float] = {
    **{name: torch.finfo(getattr(torch, name)).max for name in _FLOATS},
    **{name: torch.iinfo(getattr(torch, name)).max for name in ("int32", "int64")},
    "bool": 1,
}
_NUMBERS = (bool, int, float)
_RANK = 8  # A shape of more dimensions is copied.


def filled(original: Callable) -> Callable:
    """Wraps `convert_to_tensor`, for numbers, and for shapes with a dtype."""

    @functools.wraps(original)
    def convert_to_tensor(
        x: Any, dtype: Any = None, sparse: Any = None, ragged: Any = None
    ) -> Any:
        kind = type(x)
        if kind in _NUMBERS or kind is tuple:
            made = None if sparse or ragged else _filled(x, kind, dtype)
            if made is not None:
                return made
        return original(x, dtype, sparse, ragged)

    return convert_to_tensor


def array(original: Callable) -> Callable:
    """Wraps `ops.array`, by which CosineDecay takes pi."""

    @functools.wraps(original)
    def array(x: Any, dtype: Any = None) -> Any:
        if type(x) in _NUMBERS:
            return ops.convert_to_tensor(x, dtype)
        return original(x, dtype)

    return array


def beside_tensors(original: Callable) -> Callable:
    """Wraps operations whose numbers Keras takes for tensors: `multiply`, `subtract`.

    And the sum of a variable, such as a count of steps, and a number.
    """

    @functools.wraps(original)
    def operation(x1: Any, x2: Any) -> Any:
        if type(x1) in _NUMBERS:
            x1 = ops.convert_to_tensor(x1)
        if type(x2) in _NUMBERS:
            x2 = ops.convert_to_tensor(x2)
        return original(x1, x2)

    return operation


def where(original: Callable) -> Callable:
    @functools.wraps(original)
    def where(condition: Any, x1: Any = None, x2: Any = None) -> Any:
        if type(x1) in _NUMBERS:
            x1 = ops.convert_to_tensor(x1)
        if type(x2) in _NUMBERS:
            x2 = ops.convert_to_tensor(x2)
        return original(condition, x1, x2)

    return where


def extremes(original: Callable) -> Callable:
    """Wraps `maximum` and `minimum`, where a number has the dtype of the tensor."""

    @functools.wraps(original)
    def operation(x1: Any, x2: Any) -> Any:
        if type(x2) in _NUMBERS and isinstance(x1, torch.Tensor):
            dtype = keras.backend.result_type(x1.dtype, type(x2))
            x2 = ops.convert_to_tensor(x2, dtype)
        return original(x1, x2)

    return operation


def _filled(x: Any, kind: type, dtype: Any) -> torch.Tensor | None:
    """The tensor; None if Keras has to make it."""
    if torch.compiler.is_compiling():  # There a number is a constant.
        return None
    if dtype is not None:
        name = keras.backend.standardize_dtype(dtype)
    elif kind is tuple:
        return None
    else:
        name = {bool: "bool", int: "int32"}.get(kind) or keras.config.floatx()
    # Keras knows on which device new tensors belong.
    if kind is not tuple:
        made: Any = ops.empty((), name) if _fits(x, name) else None
        # In a trace a number is a constant.
        return made.fill_(x) if type(made) is torch.Tensor else None
    if not 0 < len(x) <= _RANK or not all(_fits(number, name) for number in x):
        return None
    made = ops.empty((len(x),), name)
    if type(made) is not torch.Tensor:
        return None
    for part, number in zip(made, x, strict=True):
        part.fill_(number)
    return made


def _fits(x: Any, dtype: str) -> bool:
    largest = _LARGEST.get(dtype)
    if largest is None or type(x) not in _NUMBERS:
        return False
    if type(x) is float and dtype in _FLOATS:
        return not largest < abs(x) < math.inf  # So nan fits, too.
    return abs(x) <= min(largest, _LARGEST["int64"])
