"""cuDNN's LSTM in half-precision layers: JAX has it only in float32.

Keras uses it if the process has an NVIDIA GPU. In float32 it takes 11 kernels, or 13 if
bidirectional; the loop in half precision takes 31 for each time step.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import keras

import keras_mp.keras_private as private
from keras_mp.backends.interface import HALF, Wrapper
from keras_mp.types import Tensor

NAMES = ("lstm", "bidirectional_lstm")


def repairs() -> dict[str, Wrapper]:
    found = [name for name in NAMES if hasattr(private.backend_rnn, name)]
    return dict.fromkeys(found, _in_float32)


def _in_float32(original: Callable) -> Callable:
    @functools.wraps(original)
    def lstm(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = jnp.result_type(inputs)
        if dtype.name not in HALF:
            return original(inputs, *args, **kwargs)
        # Arguments that are not numbers, such as an activation, stay.
        wide_args, wide_kwargs = keras.tree.map_structure(
            lambda x: _cast(x, "float32"), ((inputs, *args), kwargs)
        )
        results = original(*wide_args, **wide_kwargs)
        return keras.tree.map_structure(lambda x: _cast(x, dtype), results)

    return lstm


def _cast(x: Tensor, dtype: Any) -> Any:
    is_float = hasattr(x, "dtype") and keras.backend.is_float_dtype(x.dtype)
    return jnp.asarray(x).astype(dtype) if is_float else x
