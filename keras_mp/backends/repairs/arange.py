"""`arange` in float16 inside TensorFlow's graphs, for which there is no kernel."""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops


def in_float16(arange: Callable) -> Callable:
    """A Keras backend's `arange` that makes float16 numbers in float32 on TensorFlow.

    Keras does so outside of graphs. Elsewhere it is the function itself.
    """
    if keras.backend.backend() != "tensorflow":
        return arange

    def operate(
        start: Any, stop: Any = None, step: Any = None, dtype: Any = None
    ) -> Any:
        if dtype is None or keras.backend.standardize_dtype(dtype) != "float16":
            return arange(start, stop, step, dtype)
        wide = (
            ops.cast(x, "float32") if hasattr(x, "dtype") else x
            for x in (start, stop, step)
        )
        return ops.cast(arange(*wide, "float32"), "float16")

    return operate
