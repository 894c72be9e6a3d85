"""What half precision cannot compute on any backend, computed in float32."""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_mp.backends.interface import HALF
from keras_mp.types import Tensor


def orthogonal(original: Callable) -> Callable:
    """Wraps the call of Keras' `Orthogonal`, with which recurrent layers start."""

    def __call__(self: Any, shape: Any, dtype: Any = None) -> Any:
        if dtype is None or keras.backend.standardize_dtype(dtype) not in HALF:
            return original(self, shape, dtype)
        return ops.cast(original(self, shape, "float32"), dtype)

    return __call__


def normalize(original: Callable) -> Callable:
    """Wraps `ops.normalize`: 1 over its epsilon of 1e-7 is infinite in float16."""

    def normalize(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = ops.convert_to_tensor(x)
        dtype = keras.backend.standardize_dtype(x.dtype)
        if dtype not in HALF:
            return original(x, *args, **kwargs)
        return ops.cast(original(ops.cast(x, "float32"), *args, **kwargs), dtype)

    return normalize
