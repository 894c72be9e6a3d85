"""Scaled dot-product attention where a backend's own fails in float16."""

import math
from collections.abc import Callable
from typing import Any

import keras
from keras import ops


def in_float16(dot_product_attention: Callable) -> Callable:
    """A Keras backend's `dot_product_attention` that is safe in float16.

    On TensorFlow logits are products of queries and keys in float16, and scaled only
    when they have passed 65504: here the queries are scaled before, by a power of two,
    which rounds nothing. On JAX there is no float16 kernel for CPUs: there it computes
    in float32, and returns float16. Elsewhere it is the function itself.
    """
    repair = _REPAIRS.get(keras.backend.backend())
    if repair is None:
        return dot_product_attention

    def attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
        dtypes = (tensor.dtype for tensor in (query, key, value))
        if keras.backend.result_type(*dtypes) != "float16":
            return dot_product_attention(query, key, value, **options)
        return repair(dot_product_attention, query, key, value, **options)

    return attention


def _scale_before(
    attention: Callable, query: Any, key: Any, value: Any, scale: Any, **options: Any
) -> Any:
    if scale is None:
        scale = 1 / math.sqrt(key.shape[-1])
    # What is left of the scale is 1 or more: the product is never above the logits.
    mantissa, exponent = math.frexp(scale)
    query = ops.multiply(query, ops.cast(2.0 ** (exponent - 1), query.dtype))
    return attention(query, key, value, scale=2 * mantissa, **options)


def _in_float32_on_cpus(
    attention: Callable, query: Any, key: Any, value: Any, **options: Any
) -> Any:
    import jax

    if jax.devices()[0].platform != "cpu":
        return attention(query, key, value, **options)
    tensors = (ops.cast(tensor, "float32") for tensor in (query, key, value))
    return ops.cast(attention(*tensors, **options), "float16")


_REPAIRS: dict[str, Callable] = {
    "tensorflow": _scale_before,
    "jax": _in_float32_on_cpus,
}
