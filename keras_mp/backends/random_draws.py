"""Random draws that do not depend on the precision that they are drawn for."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from keras import backend, ops

import keras_mp.keras_private as private
from keras_mp.replaced import replaced

_BY_SHAPE = ("normal", "truncated_normal", "uniform")


@contextlib.contextmanager
def same_draws_in_every_dtype() -> Iterator[None]:
    """Makes draws from the same seed the same in half precision and float32.

    Numbers are drawn in float32 and rounded. Without this, TensorFlow and torch draw
    other numbers for float16 than for float32; JAX does, too, except in a Dropout.
    """
    drawing = dict.fromkeys(_BY_SHAPE, _by_shape) | {"dropout": _dropout}
    with replaced("random draws", private.backend_random, drawing):
        yield


def _by_shape(original: Callable) -> Callable:
    @functools.wraps(original)
    def draw(*args: Any, dtype: Any = None, **kwargs: Any) -> Any:
        dtype = dtype or backend.floatx()
        return ops.cast(original(*args, dtype="float32", **kwargs), dtype)

    return draw


def _dropout(original: Callable) -> Callable:
    @functools.wraps(original)
    def dropout(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = ops.convert_to_tensor(inputs)
        wide = original(ops.cast(inputs, "float32"), *args, **kwargs)
        return ops.cast(wide, inputs.dtype)

    return dropout
