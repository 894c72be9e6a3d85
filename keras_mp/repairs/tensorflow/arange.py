"""`arange` in float16 inside TensorFlow's graphs, which have no kernel for it."""

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras import ops


def made_in_float32(original: Callable) -> Callable:
    """Makes float16 numbers in float32 and casts them, as Keras does outside graphs."""

    @functools.wraps(original)
    def arange(
        start: Any, stop: Any = None, step: Any = None, dtype: Any = None
    ) -> Any:
        if dtype is None or keras.backend.standardize_dtype(dtype) != "float16":
            return original(start, stop, step, dtype)
        wide = (
            ops.cast(x, "float32") if hasattr(x, "dtype") else x
            for x in (start, stop, step)
        )
        return ops.cast(original(*wide, "float32"), "float16")

    return arange
