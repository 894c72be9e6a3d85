"""Loss scaling on TensorFlow: `tf.cond` in graphs, a Python `if` eagerly.

Where XLA compiles, selects: a conditional there copies what goes through it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.backends.tensorflow.gradients import (
    all_finite,
    compiled_by_xla,
    nonfinite,
    nonfinite_to_nan,
    unscale,
)
from keras_mp.backends.tensorflow.replicas import check_strategy, on_any_replica
from keras_mp.backends.tensorflow.writes import written_where
from keras_mp.backends.train_function import make_train_function
from keras_mp.backends.train_logs import (
    any_measured,
    loss_is_finite,
    with_scale,
    without_step,
)

__all__ = [
    "all_finite",
    "build",
    "check_strategy",
    "compiled",
    "is_tracing",
    "make_train_function",
    "nonfinite",
    "optimizer_scope",
    "optimizer_values",
    "outside_trace",
    "nonfinite_to_nan",
    "refuse_baking",
    "undo_skipped",
    "unscale",
    "update_if",
]


def is_tracing() -> bool:
    """Whether we are inside a tf.function that is being traced."""
    return not tf.executing_eagerly()


def compiled(
    results: Callable, static: Sequence[int] = ()
) -> Callable[[Callable], Callable]:
    """The function itself: compiling is left to the `tf.function` it is called in."""
    return lambda function: function


def outside_trace() -> contextlib.AbstractContextManager:
    """Where variables are given their first values: not at each step of a graph."""
    return tf.init_scope()


def refuse_baking(what: str, remedy: str) -> None:
    """Nothing to refuse: a traced function reads a tf.Variable anew at each call."""
    return  # AutoGraph warns of a function that is a docstring alone.


@contextlib.contextmanager
def optimizer_scope(model: Any) -> Iterator[None]:
    """Where the variables of a model's optimizer are created: its strategy's scope.

    And outside of a trace, at whose second run it may be that layers become known.
    """
    strategy = model.distribute_strategy
    known = tf.distribute.has_strategy()
    with tf.init_scope(), contextlib.nullcontext() if known else strategy.scope():
        yield


def update_if(
    finite: tf.Tensor,
    update: Callable[[list[Any]], None],
    grads: list[Any],
    written: Callable[[], Sequence[Any] | None],
    branches: bool = False,
) -> None:
    """Runs `update(grads)` if `finite`, or takes back what it writes if not.

    `written` says what that is, if all of it is known.
    """
    if tf.executing_eagerly() and not tf.distribute.has_strategy():
        if finite:
            update(grads)
        return
    # Of the rows of a table that are written a select would read all the others too.
    sparse = any(isinstance(g, tf.IndexedSlices) for g in grads)
    selects = compiled_by_xla() and not (sparse or tf.distribute.has_strategy())
    known = written() if selects else None
    if known is not None:
        with written_where(finite, known):
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
    model: Any, optimizer: Any, step: Callable[..., Any]
) -> Callable[..., Any]:
    """Wraps a train step so that one which the optimizer skips leaves no trace.

    Non-trainable variables, metrics and the logs made of them are what they were, and
    so is the loss scale if the loss itself was not finite.
    """

    def undoing(data: Any) -> Any:
        changing = model.non_trainable_variables + model.metrics_variables
        variables = {id(v): v.value for v in changing}
        before = [tf.identity(v) for v in variables.values()]
        measured = any_measured([v.value for v in model.metrics_variables])
        own = [v.value for v in optimizer.state_variables]
        blameless = optimizer.state_after_broken_step([tf.identity(v) for v in own])
        skips = optimizer.skip_counter.value
        count = tf.identity(skips)
        logs = step(data)
        skipped = skips > count
        # The loss of a replica's own share of the batch.
        broken = skipped & on_any_replica(~loss_is_finite(logs))
        for variable, value in zip(own, blameless, strict=True):
            variable.assign(tf.where(broken, value, variable))
        update_if(
            skipped,
            functools.partial(_put_back, variables.values()),
            before,
            written=lambda: changing,
        )
        # Keras on TensorFlow creates the variables of metrics within the first step.
        new = [
            m for m in model.metrics if any(id(v) not in variables for v in m.variables)
        ]

        def reset() -> None:
            for metric in new:
                metric.reset_state()

        tf.cond(skipped, reset, lambda: None)
        logs = without_step(logs, model.get_metrics_result(), skipped, measured)
        return with_scale(
            model,
            logs,
            optimizer.loss_scale,
            optimizer.skipped_steps,
            optimizer.underflow_watch.take(),
        )

    return undoing


def _put_back(variables: Iterable[Any], values: list[tf.Tensor]) -> None:
    """Gives variables their values, each replica its own: none are added up."""

    def assign(strategy: Any, values: list[Any]) -> None:
        for variable, value in zip(variables, values, strict=True):
            strategy.extended.update(
                variable, lambda v, x: v.assign(x), args=(value,), group=False
            )

    tf.distribute.get_replica_context().merge_call(assign, args=(values,))


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
