"""The repairs on TensorFlow."""

import tensorflow as tf

from keras_mp.backends.interface import Wrapper
from keras_mp.repairs import broadcasting
from keras_mp.repairs.tensorflow import arange, attention
from keras_mp.types import Tensor


def wrappers() -> dict[str, Wrapper]:
    return {
        **broadcasting.repairs(_is_summed_in_half, broadcast=_to_shape_of),
        "dot_product_attention": attention.scaled_first,
        "arange": arange.made_in_float32,
    }


def _to_shape_of(x: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    # Each value stays as it is, -0.0 too. `tf.broadcast_to` takes a shape: if a size is
    # unknown, it is no constant in the gradient of a loop, and XLA refuses that.
    return x - tf.zeros_like(other, x.dtype)


def _is_summed_in_half(x1: Tensor, x2: Tensor) -> bool:
    """Does TensorFlow sum the gradient of a broadcast operand in half precision?"""
    return (
        isinstance(x1, tf.Tensor)
        and isinstance(x2, tf.Tensor)
        and x1.dtype == x2.dtype
        and x1.dtype.name in ("float16", "bfloat16")
        and None not in (x1.shape.rank, x2.shape.rank)
        and not tf.config.list_physical_devices("GPU")
    )
