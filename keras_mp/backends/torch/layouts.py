"""Attention and convolutions in half precision without copies of their inputs.

Keras brings these into the order in memory that some kernel of an older torch wanted.
Those of today take any, and have the same results.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import torch
from keras import ops

from keras_mp.backends.engine import HALF


def _is_half(x: torch.Tensor) -> bool:
    return keras.backend.standardize_dtype(x.dtype) in HALF


def attention_as_it_is(original: Callable) -> Callable:
    """Wraps `dot_product_attention`: no mask, no bias, as many heads of each."""

    @functools.wraps(original)
    def attention(
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        scale: Any = None,
        is_causal: bool = False,
        **rest: Any,
    ) -> Any:
        tensors = [ops.convert_to_tensor(x) for x in (query, key, value)]
        asked = bias, mask, *rest.values()
        alike = len({(x.dtype, x.ndim, *x.shape[2:3]) for x in tensors}) == 1
        half = _is_half(tensors[0]) and tensors[0].ndim == 4
        if any(x is not None for x in asked) or not (alike and half):
            return original(
                query, key, value, bias, mask, scale, is_causal=is_causal, **rest
            )
        # Positions and heads change places.
        result = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in tensors), is_causal=is_causal, scale=scale
        )
        return result.transpose(1, 2)

    return attention


def convolution_as_it_is(original: Callable) -> Callable:
    """Wraps `conv` of images with channels last, which is an order torch knows."""

    @functools.wraps(original)
    def conv(
        inputs: Any,
        kernel: Any,
        strides: Any = 1,
        padding: str = "valid",
        data_format: str | None = None,
        dilation_rate: Any = 1,
    ) -> Any:
        x = ops.convert_to_tensor(inputs)
        last = data_format or keras.config.image_data_format()
        if not _is_half(x) or x.ndim < 4 or last != "channels_last":
            return original(
                inputs, kernel, strides, padding, data_format, dilation_rate
            )
        x = x.movedim(-1, 1)
        y = original(x, kernel, strides, padding, "channels_first", dilation_rate)
        return y.movedim(1, -1)

    return conv
