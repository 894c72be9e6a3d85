"""Scaled dot-product attention for backends whose own fails in float16."""

import functools
import math
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_mp.types import Tensor


def scaled_first(original: Callable) -> Callable:
    """Scales the queries before their product with the keys, not the product.

    TensorFlow multiplies queries and keys in float16, and scales the logits afterwards,
    when they may have passed 65504. Here the scale is split: a power of two, which
    rounds nothing, goes to the queries.
    """

    @functools.wraps(original)
    def attention(
        query: Tensor, key: Tensor, value: Tensor, scale: Tensor = None, **rest: Any
    ) -> Any:
        query, key, value = (ops.convert_to_tensor(x) for x in (query, key, value))
        if keras.backend.result_type(query.dtype, key.dtype, value.dtype) != "float16":
            return original(query, key, value, scale=scale, **rest)
        if scale is None:
            scale = 1 / math.sqrt(key.shape[-1])
        if ops.is_tensor(scale) or isinstance(scale, keras.Variable):  # It is learned.
            wide = ops.multiply(ops.cast(query, "float32"), ops.cast(scale, "float32"))
            return original(ops.cast(wide, "float16"), key, value, scale=1.0, **rest)
        # The rest of the scale is 1 or more: no product is above its logit.
        mantissa, exponent = math.frexp(scale)
        query = ops.multiply(query, ops.cast(2.0 ** (exponent - 1), query.dtype))
        return original(query, key, value, scale=2 * mantissa, **rest)

    return attention
