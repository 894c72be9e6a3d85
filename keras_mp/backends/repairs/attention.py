"""Scaled dot-product attention where a backend's own fails in float16."""

import functools
import math
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_mp.backends.engine import Wrapper


def _in_float16_only(repair: Callable) -> Wrapper:
    """A wrapper of `dot_product_attention` that repairs its calls in float16."""

    def wrap(original: Callable) -> Callable:
        @functools.wraps(original)
        def attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
            tensors = [ops.convert_to_tensor(x) for x in (query, key, value)]
            if keras.backend.result_type(*(x.dtype for x in tensors)) != "float16":
                return original(query, key, value, **options)
            return repair(original, *tensors, **options)

        return attention

    return wrap


@_in_float16_only
def scaled_first(
    original: Callable, query: Any, key: Any, value: Any, scale: Any = None, **rest: Any
) -> Any:
    """Scales the queries before their product with the keys, not the product.

    TensorFlow multiplies queries and keys in float16, and scales the logits when they
    have passed 65504. Here the scale is split: a power of two, which rounds nothing,
    goes to the queries.
    """
    if scale is None:
        scale = 1 / math.sqrt(key.shape[-1])
    if ops.is_tensor(scale) or isinstance(scale, keras.Variable):  # It may be learned.
        wide = ops.multiply(ops.cast(query, "float32"), ops.cast(scale, "float32"))
        return original(ops.cast(wide, "float16"), key, value, scale=1.0, **rest)
    # The rest of the scale is 1 or more: no product is above its logit.
    mantissa, exponent = math.frexp(scale)
    query = ops.multiply(query, ops.cast(2.0 ** (exponent - 1), query.dtype))
    return original(query, key, value, scale=2 * mantissa, **rest)


def in_float32_if(on_cpus: Callable[[], bool]) -> Wrapper:
    """Computes in float32 and returns float16 where `on_cpus()`.

    JAX has no float16 kernel for CPUs.
    """

    @_in_float16_only
    def repair(original: Callable, *tensors: Any, **options: Any) -> Any:
        if not on_cpus():
            return original(*tensors, **options)
        wide = (ops.cast(tensor, "float32") for tensor in tensors)
        return ops.cast(original(*wide, **options), "float16")

    return repair
