"""Convolutions in half precision without copies of their inputs.

Keras copies them into the order in memory that some kernel of an older torch wanted.
Today's kernels take any order, with the same results.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_mp.backends.leaves import is_half_tensor
from keras_mp.types import Tensor


def convolution_as_it_is(original: Callable) -> Callable:
    """Wraps `conv` of images with channels last, an order that torch supports."""

    @functools.wraps(original)
    def conv(
        inputs: Any,
        kernel: Tensor,
        strides: Any = 1,
        padding: str = "valid",
        data_format: str | None = None,
        dilation_rate: Any = 1,
    ) -> Any:
        x = ops.convert_to_tensor(inputs)
        last = data_format or keras.config.image_data_format()
        if not is_half_tensor(x) or x.ndim < 4 or last != "channels_last":
            return original(
                inputs, kernel, strides, padding, data_format, dilation_rate
            )
        x = x.movedim(-1, 1)
        y = original(x, kernel, strides, padding, "channels_first", dilation_rate)
        return y.movedim(1, -1)

    return conv
