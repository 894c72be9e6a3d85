"""Stochastic rounding to bfloat16 on TensorFlow, with the same bits as on JAX."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.backends.rounding import RandomBits, Words
from keras_mp.types import Tensor


def _numbers(shape: Sequence[int], axis: int) -> tf.Tensor:
    own = [-1 if i == axis else 1 for i in range(len(shape))]
    line = tf.cast(tf.range(shape[axis]), tf.uint32)
    return tf.broadcast_to(tf.reshape(line, own), shape)


def _shift(x: tf.Tensor, bits: int) -> tf.Tensor:
    return tf.bitwise.right_shift(x, tf.constant(bits, x.dtype))


_WORDS = Words(
    word=lambda x: (
        tf.constant(x, tf.uint32) if isinstance(x, int) else tf.cast(x, tf.uint32)
    ),
    xor=tf.bitwise.bitwise_xor,
    shift=_shift,
    numbers=_numbers,
)


def stochastic_rounding(seed: Tensor, step: Any) -> Callable[[Any], Any]:
    random = RandomBits(_WORDS, seed, step)

    def rounded(x: tf.Tensor) -> tf.Tensor:
        noise = tf.bitwise.bitwise_and(random.next(x.shape), 0xFFFF)
        sums = tf.bitcast(x, tf.uint32) + noise
        near = tf.bitcast(tf.cast(_shift(sums, 16), tf.uint16), tf.bfloat16)
        # The sum turns nans into infinities and zeros.
        return tf.where(tf.math.is_nan(x), tf.constant(float("nan"), tf.bfloat16), near)

    return rounded
