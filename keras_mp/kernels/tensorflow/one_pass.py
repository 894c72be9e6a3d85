"""The sums that a cross-entropy needs in one pass over its logits, by XLA.

As in online softmax (Milakov and Gimelshein 2018).
"""

from typing import Any

import tensorflow as tf

from keras_mp.backends.tensorflow import private
from keras_mp.types import Tensor


def log_sums(logits: Tensor, classes: bool) -> tuple[Any, Any]:
    """The logarithms of the sums of the exponentials: (..., classes) to (...,).

    And the classes of the largest logits, or None.
    """
    operands = [logits, tf.ones_like(logits)]
    first = [tf.constant(tf.float32.min), tf.constant(0.0)]
    if classes:
        places = tf.range(logits.shape[-1])
        operands.append(tf.broadcast_to(places, tf.shape(logits)))
        first.append(tf.constant(0))
    combine = _of_all if classes else _of_both
    largest, total, *found = private.reduce(operands, first, combine)
    # As Keras has it, nan if a logit is infinity.
    sums = largest + tf.math.log(total)
    sums = tf.where(largest == float("inf"), float("nan"), sums)
    sums, *found = (tf.ensure_shape(x, logits.shape[:-1]) for x in (sums, *found))
    return sums, found[0] if classes else None


def _of_both(m: Any, s: Any, n: Any, t: Any) -> tuple[Any, Any]:
    """The larger maximum, and the sum of the exponentials after subtracting it."""
    other = tf.exp(-tf.abs(m - n))
    total = tf.where(m >= n, s + other * t, other * s + t)
    return tf.maximum(m, n), total


def _of_all(m: Any, s: Any, i: Any, n: Any, t: Any, j: Any) -> tuple[Any, Any, Any]:
    """The same, and the class of the maximum: the first if equal, any if one is nan."""
    if_not_m = tf.where(n > m, j, tf.minimum(i, j))
    return *_of_both(m, s, n, t), tf.where(m > n, i, if_not_m)
