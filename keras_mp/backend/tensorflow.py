"""Loss scaling on TensorFlow: `tf.cond` in graphs, a Python `if` eagerly."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.backend.train_function import make_train_function

__all__ = [
    "all_finite",
    "build",
    "is_tracing",
    "make_train_function",
    "optimizer_values",
    "poison",
    "refuse_baking",
    "undo_skipped",
    "unscale",
    "update_if",
]


def is_tracing() -> bool:
    """Whether we are inside a tf.function that is being traced."""
    return not tf.executing_eagerly()


def refuse_baking(what: str, remedy: str) -> None:
    """Nothing to refuse: a traced function reads a tf.Variable anew at each call."""


def unscale(grads: Sequence[Any], inverse_scale: Any) -> list[Any]:
    """Multiplies each gradient by `inverse_scale` in float32; None stays None."""

    def multiply(values: tf.Tensor) -> tf.Tensor:
        wide = tf.float64 if values.dtype == tf.float64 else tf.float32
        return tf.cast(values, wide) * tf.cast(inverse_scale, wide)

    return [_on_values(multiply, g) for g in grads]


def poison(grads: Sequence[Any]) -> list[Any]:
    """Turns infinities into nan, which clipping by value cannot make finite again."""

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


def all_finite(grads: Sequence[Any]) -> tf.Tensor:
    """Bool scalar: is every element of every gradient finite, on every replica?"""
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads]
    flags = [
        tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(v)))
        for v in values
        if v is not None
    ]
    finite = tf.reduce_all(tf.stack(flags))
    context = tf.distribute.get_replica_context()
    if context is None:
        raise ValueError(
            "The optimizer must be applied in a replica context: call it within "
            "`strategy.run`. Received: a call in a cross-replica context."
        )
    if context.num_replicas_in_sync > 1:
        # Before anyone decides, and outside of any branch: replicas that disagreed
        # would wait for each other for ever.
        bad = context.all_reduce(
            tf.distribute.ReduceOp.SUM, tf.cast(tf.logical_not(finite), tf.float32)
        )
        finite = tf.equal(bad, 0)
    return finite


def update_if(
    finite: tf.Tensor, update: Callable[[list[Any]], None], grads: list[Any]
) -> None:
    """Runs `update(grads)` if `finite`."""
    if tf.executing_eagerly() and not tf.distribute.has_strategy():
        if finite:
            update(grads)
        return
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        tf.cond(finite, lambda: update(grads), lambda: None)
        return

    def across_replicas(strategy: Any, finite: Any, grads: Any) -> None:
        # All replicas agree, so the first one's flag is everyone's. The branch stands
        # in the cross-replica context: `update` itself calls merge_call.
        tf.cond(
            strategy.experimental_local_results(finite)[0],
            lambda: strategy.extended.call_for_each_replica(update, args=(grads,)),
            lambda: None,
        )

    context = tf.distribute.get_replica_context()
    context.merge_call(across_replicas, args=(finite, grads))


def optimizer_values(args: Sequence[Any]) -> list[Any] | None:
    """None: `fit` leaves the optimizer's state in its variables."""
    return None


def undo_skipped(
    model: Any, skips: Any, step: Callable[..., Any]
) -> Callable[..., Any]:
    """Wraps a train step so that one which `skips` counts leaves no trace.

    Non-trainable variables, metrics and the logs made of them are what they were.
    """

    def undoing(data: Any) -> Any:
        variables = {
            id(v): v.value
            for v in model.non_trainable_variables + model.metrics_variables
        }
        before = [tf.identity(v) for v in variables.values()]
        count = tf.identity(skips.value)
        logs = step(data)
        skipped = skips.value > count
        for variable, value in zip(variables.values(), before, strict=True):
            variable.assign(tf.where(skipped, value, variable))
        # Keras on TensorFlow creates the variables of metrics within the first step.
        new = [
            m for m in model.metrics if any(id(v) not in variables for v in m.variables)
        ]

        def reset() -> None:
            for metric in new:
                metric.reset_state()

        tf.cond(skipped, reset, lambda: None)
        results = model.get_metrics_result()
        return {
            name: tf.where(skipped, tf.cast(results[name], log.dtype), log)
            if name in results
            else log
            for name, log in logs.items()
        }

    return undoing


def build(model: Any, data: Any) -> None:
    """Builds a model from the data of its first train step, as other backends do.

    Keras on TensorFlow leaves it to the step itself. Its optimizer and the variables
    that a skipped step must not touch are known only once it is built.
    """
    try:
        model._symbolic_build(data_batch=data)
    except (RuntimeError, ValueError):
        # A model that cannot be built so, of a `train_step` of the user's: let it.
        pass
