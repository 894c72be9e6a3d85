"""Gradients on TensorFlow: unscaled, and checked for what is not finite."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.backends.engine import FINITE, NAN
from keras_mp.backends.split_reductions import split_axis
from keras_mp.backends.tensorflow import private
from keras_mp.backends.tensorflow.replicas import highest_of_all_replicas

# Gradients up to this many elements are checked together, so that the number of
# reductions does not grow with the number of variables.
GROUPED_ELEMENTS = 64 * 1024


def unscale(
    grads: Sequence[Any], inverse_scale: Any, variables: Sequence[Any] | None = None
) -> list[Any]:
    """See `Engine.unscale`."""

    def multiply(values: tf.Tensor) -> tf.Tensor:
        wide = tf.float64 if values.dtype == tf.float64 else tf.float32
        return tf.cast(values, wide) * tf.cast(inverse_scale, wide)

    return [_on_values(multiply, g) for g in grads]


def nonfinite_to_nan(grads: Sequence[Any]) -> list[Any]:
    """See `Engine.nonfinite_to_nan`."""

    def to_nan(values: tf.Tensor) -> tf.Tensor:
        nan = tf.constant(float("nan"), values.dtype)
        return tf.where(tf.math.is_finite(values), values, nan)

    return [_on_values(to_nan, g) for g in grads]


def _on_values(function: Callable[[tf.Tensor], tf.Tensor], grad: Any) -> Any:
    """Applies a function to a gradient's values: sparse stays sparse, None None."""
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(function(grad.values), grad.indices, grad.dense_shape)
    return function(tf.convert_to_tensor(grad))


def nonfinite(grads: Sequence[Any]) -> tf.Tensor:
    """See `Engine.nonfinite`."""
    grads = [_on_values(tf.convert_to_tensor, g) for g in grads]
    alike: dict[Any, list[int]] = {}
    for index, grad in enumerate(grads):
        alike.setdefault(_group(grad) or index, []).append(index)
    groups = list(alike.values())
    values = [_together([grads[i] for i in group]) for group in groups]

    def exactly() -> tf.Tensor:
        codes = tf.concat([_codes(v) for v in values], axis=0)
        return tf.gather(codes, np.argsort([i for g in groups for i in g]))

    if compiled_by_xla():
        return highest_of_all_replicas(exactly())
    # A sum of squares takes one pass, in a single kernel. It overflows at 1.8e19: only
    # then, or where a gradient is not finite, is each checked on its own.
    squares = tf.add_n([_sum_of_squares(v) for v in values if v is not None])
    finite = tf.fill((len(grads),), tf.constant(FINITE, tf.int8))
    codes = tf.cond(tf.math.is_finite(squares), lambda: finite, exactly)
    return highest_of_all_replicas(codes)


def compiled_by_xla() -> bool:
    """Does XLA compile what is being traced?"""
    return private.is_in_xla_context(tf.compat.v1.get_default_graph())


def _together(grads: list[Any]) -> Any:
    """The values of gradients of one shape, a row for each; None for None."""
    if len(grads) > 1:
        return tf.stack(grads)
    (grad,) = grads
    if grad is None:
        return None
    return (grad.values if isinstance(grad, tf.IndexedSlices) else grad)[tf.newaxis]


def _sum_of_squares(values: tf.Tensor) -> tf.Tensor:
    wide = tf.float64 if values.dtype == tf.float64 else tf.float32
    return tf.cast(tf.nn.l2_loss(tf.cast(values, wide)), tf.float32)


def _group(grad: Any) -> Any:
    """What small dense gradients that may be checked together have in common."""
    if grad is None or isinstance(grad, tf.IndexedSlices):
        return None
    elements = grad.shape.num_elements()
    small = elements is not None and elements <= GROUPED_ELEMENTS
    return (tuple(grad.shape), grad.dtype) if small else None


def _codes(values: Any) -> tf.Tensor:
    """The code of each row, int8: is it finite, or what does it hold?"""
    if values is None:
        return tf.zeros((1,), tf.int8)
    if values.shape.rank is None:
        values = tf.reshape(values, (1, -1))
    rows = _bits(values)
    split = rows.shape.is_fully_defined() and split_axis(rows.shape, first=1)
    if split:
        shape, axis = split
        rows = tf.reduce_max(tf.reshape(rows, shape), axis)
    codes = tf.clip_by_value(rows, _BELOW, _BELOW + NAN) - _BELOW
    codes = tf.cast(codes, tf.int8)
    largest = tf.reduce_max(codes, axis=range(1, codes.shape.rank))
    # The maximum of an empty gradient is the lowest integer.
    return tf.maximum(largest, tf.constant(FINITE, tf.int8))


def _bits(x: tf.Tensor) -> tf.Tensor:
    # The bits of |x| order as integers do: infinity above all numbers, nan above it.
    # An integer maximum, unlike one of floats, cannot lose a nan.
    if x.dtype == tf.float64:  # A large one would become infinite in float32.
        x = tf.where(tf.math.is_finite(x), tf.zeros_like(x), x)
    # No `abs`, which XLA leaves out of that of a square: the sign of a nan would stay.
    bits = tf.bitcast(tf.cast(x, tf.float32), tf.int32)
    return tf.bitwise.bitwise_and(bits, 0x7FFFFFFF)


# The bits of the largest number.
_BELOW = 0x7F7FFFFF


def all_finite(codes: tf.Tensor) -> tf.Tensor:
    """See `Engine.all_finite`."""
    # The square root keeps XLA from computing the whole reduction once more in each
    # of the selects that read the flag.
    return tf.sqrt(tf.reduce_sum(tf.cast(codes, tf.float32))) == 0


def is_summed_in_half(x1: Any, x2: Any) -> bool:
    """Does TensorFlow sum the gradient of a broadcast operand in half precision?"""
    return (
        isinstance(x1, tf.Tensor)
        and isinstance(x2, tf.Tensor)
        and x1.dtype == x2.dtype
        and x1.dtype.name in ("float16", "bfloat16")
        and None not in (x1.shape.rank, x2.shape.rank)
        and not tf.config.list_physical_devices("GPU")
    )
