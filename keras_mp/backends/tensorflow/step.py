"""A step on TensorFlow: `tf.cond` in graphs, a Python `if` eagerly.

If XLA compiles, it uses selects: a conditional there copies what passes through it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.backends import own_methods, reductions
from keras_mp.backends.step import FINITE, NAN, Step, Update
from keras_mp.backends.tensorflow import private, replicas, rounding
from keras_mp.backends.tensorflow.replicas import highest_of_all_replicas
from keras_mp.backends.tensorflow.writes import written_where
from keras_mp.types import Gradients, Tensor

_FINITE, _BELOW = np.int8(FINITE), reductions.LARGEST_NUMBER


def unscale(grads: Gradients, inverse_scale: Tensor) -> list[Any]:
    def multiply(values: tf.Tensor) -> tf.Tensor:
        wide = _wide(values)
        return tf.cast(values, wide) * tf.cast(inverse_scale, wide)

    return [_on_values(multiply, g) for g in grads]


def nonfinite_to_nan(grads: Gradients) -> list[Any]:
    def to_nan(values: tf.Tensor) -> tf.Tensor:
        return tf.where(tf.math.is_finite(values), values, float("nan"))

    return [_on_values(to_nan, g) for g in grads]


def _on_values(function: Callable[[tf.Tensor], tf.Tensor], grad: Tensor) -> Any:
    """Applies a function to a gradient's values; keeps sparse gradients and None."""
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(function(grad.values), grad.indices, grad.dense_shape)
    return function(tf.convert_to_tensor(grad))


def nonfinite(grads: Gradients) -> tf.Tensor:
    alike: dict[Any, list[int]] = {}
    values = {i: _values(grad) for i, grad in enumerate(grads) if grad is not None}
    for index, tensor in values.items():
        alike.setdefault(_group(tensor) or index, []).append(index)
    groups = [tf.stack([values[i] for i in indices]) for indices in alike.values()]
    missing = [index for index in range(len(grads)) if index not in values]

    def exactly() -> tf.Tensor:
        codes = [*map(_codes, groups), tf.fill((len(missing),), _FINITE)]
        places = [i for indices in (*alike.values(), missing) for i in indices]
        return tf.gather(tf.concat(codes, axis=0), np.argsort(places))

    if private.compiled_by_xla():
        return highest_of_all_replicas(exactly())
    # A sum of squares takes one pass, in a single kernel. It overflows at 1.8e19: only
    # then, or if a gradient is not finite, each gradient is checked on its own.
    squares = tf.add_n([_sum_of_squares(rows) for rows in groups])
    finite = tf.fill((len(grads),), _FINITE)
    codes = tf.cond(tf.math.is_finite(squares), lambda: finite, exactly)
    return highest_of_all_replicas(codes)


def _values(grad: Tensor) -> tf.Tensor:
    sparse = isinstance(grad, tf.IndexedSlices)
    return grad.values if sparse else tf.convert_to_tensor(grad)


def _sum_of_squares(values: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.nn.l2_loss(tf.cast(values, _wide(values))), tf.float32)


def _wide(values: tf.Tensor) -> tf.DType:
    return tf.float64 if values.dtype == tf.float64 else tf.float32


def _group(values: tf.Tensor) -> Any:
    """What small gradients that may be checked together have in common."""
    elements = values.shape.num_elements()
    small = elements is not None and elements <= reductions.GROUPED_ELEMENTS
    return (tuple(values.shape), values.dtype) if small else None


def _codes(values: tf.Tensor) -> tf.Tensor:
    """The code of each row, int8: is it finite, or what does it hold?"""
    if values.shape.rank is None:
        values = tf.reshape(values, (1, -1))
    rows = _bits(values)
    if private.is_for_gpu():  # There XLA splits by itself what it reduces.
        rows = _largest(rows)
    elif rows.shape.is_fully_defined():
        split = reductions.split_axis(rows.shape, first=1)
        if split:
            shape, axis = split
            rows = tf.reduce_max(tf.reshape(rows, shape), axis)
    codes = tf.clip_by_value(rows, _BELOW, _BELOW + NAN) - _BELOW
    # The maximum of an empty gradient is the lowest integer.
    return tf.maximum(_largest(tf.cast(codes, tf.int8)), _FINITE)


def _largest(rows: tf.Tensor) -> tf.Tensor:
    return tf.reduce_max(rows, axis=range(1, rows.shape.rank))


def _bits(x: tf.Tensor) -> tf.Tensor:
    if x.dtype == tf.float64:  # A large one would become infinite in float32.
        x = tf.where(tf.math.is_finite(x), tf.zeros_like(x), x)
    # Not `abs`: XLA drops it for a square, and the sign of a nan would stay.
    bits = tf.bitcast(tf.cast(x, tf.float32), tf.int32)
    return tf.bitwise.bitwise_and(bits, reductions.ALL_BUT_SIGN)


def all_finite(codes: tf.Tensor) -> tf.Tensor:
    return tf.reduce_all(tf.equal(codes, _FINITE))


class TensorFlowStep(Step):
    """Its methods without a docstring are those of `Step`."""

    unscale = staticmethod(unscale)
    nonfinite_to_nan = staticmethod(nonfinite_to_nan)
    nonfinite = staticmethod(nonfinite)
    all_finite = staticmethod(all_finite)
    check_strategy = staticmethod(replicas.check_strategy)
    refuse_replicas = staticmethod(replicas.refuse_replicas)
    plain_updates = staticmethod(own_methods.plain_updates)
    stochastic_rounding = staticmethod(rounding.stochastic_rounding)

    def is_tracing(self) -> bool:
        """Are we inside a tf.function that is being traced?"""
        return not tf.executing_eagerly()

    def update_if(
        self, finite: Tensor, update: Update, grads: list[Tensor]
    ) -> bool | None:
        if tf.executing_eagerly() and not tf.distribute.has_strategy():
            return super().update_if(finite, update, grads)
        # A sparse gradient writes some rows of a table: a select would read them all.
        sparse = any(isinstance(g, tf.IndexedSlices) for g in grads)
        selects = private.compiled_by_xla() and not (
            sparse or tf.distribute.has_strategy()
        )
        known = update.written() if selects else None
        if known is not None:
            with written_where(finite, known):
                update.run(grads)
            return None
        if private.supports_no_merge_call():
            tf.cond(finite, lambda: update.run(grads), lambda: None)
            return None

        def across_replicas(strategy: Any, finite: Tensor, grads: Any) -> None:
            # All replicas agree, so the first one's flag is everyone's. The branch is
            # in the cross-replica context: the update itself calls merge_call.
            tf.cond(
                strategy.experimental_local_results(finite)[0],
                lambda: strategy.extended.call_for_each_replica(
                    update.run, args=(grads,)
                ),
                lambda: None,
            )

        context = tf.distribute.get_replica_context()
        context.merge_call(across_replicas, args=(finite, grads))
        return None
