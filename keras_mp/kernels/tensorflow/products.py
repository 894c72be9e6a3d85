"""Products with half-precision operands and float32 results, as XLA has them.

TensorFlow has no such product unless XLA compiles: it stays in float32.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp.backends.interface import Wrapper
from keras_mp.backends.tensorflow import private
from keras_mp.kernels import matrices, products
from keras_mp.kernels.logits import Product
from keras_mp.repairs.logits import note
from keras_mp.repairs.products import HalfOperands
from keras_mp.types import Tensor


def kernels() -> dict[str, Wrapper]:
    return products.kernels(_product, private.compiled_by_xla, **matrices.OPERATIONS)


def _product(shaped: Callable, a: Tensor, b: Tensor, operands: HalfOperands) -> Any:
    result = shaped(half_product(a, b, operands))
    # One of several axes of columns, or with its channels first, is no matrix of rows.
    if result.shape[-1] == b.shape[-1] and result.op.type == "Reshape":
        note(result, Product(a, b, operands))
    return result


def half_product(a: Tensor, b: Tensor, operands: HalfOperands) -> Any:
    """The product of (rows, k) and (k, n) in float32."""
    half, gradient, tied = operands[:3]

    @tf.custom_gradient
    def product(a: tf.Tensor, b: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        def derivative(grad: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            cast_grad, cast_a, cast_b = (tf.cast(x, gradient) for x in (grad, a, b))
            da = tf.matmul(cast_grad, cast_b, transpose_b=True)
            if tied and gradient != "float32":
                return tf.cast(da, a.dtype), product(tf.transpose(a), grad)
            db = tf.matmul(cast_a, cast_grad, transpose_a=True)
            return tf.cast(da, a.dtype), tf.cast(db, b.dtype)

        result = private.dot(tf.cast(a, half), tf.cast(b, half), 1, 0, "float32")
        return result, derivative

    # XLA always compiles it: a user's `tf.function` that is traced inside XLA code may
    # also be called outside it, with the same trace.
    return tf.function(product, jit_compile=True, autograph=False)(a, b)
