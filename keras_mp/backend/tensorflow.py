"""Loss scaling on TensorFlow: `tf.cond` in graphs, a Python `if` eagerly.

Where XLA compiles, selects: a conditional there copies what goes through it.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from keras_mp.backend.codes import FINITE, INFINITE, NAN
from keras_mp.backend.logs import (
    any_measured,
    loss_is_finite,
    with_scale,
    without_step,
)
from keras_mp.backend.train_function import make_train_function
from keras_mp.backend.windows import in_windows

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
    "poison",
    "refuse_baking",
    "undo_skipped",
    "unscale",
    "update_if",
]

# Gradients up to this many elements are checked together, so that the number of
# reductions does not grow with the number of variables.
GROUPED_ELEMENTS = 64 * 1024


def is_tracing() -> bool:
    """Whether we are inside a tf.function that is being traced."""
    return not tf.executing_eagerly()


def compiled(function: Callable, static: Sequence[int] = ()) -> Callable:
    """The function itself: compiling is left to the `tf.function` it is called in."""
    return function


def outside_trace() -> contextlib.AbstractContextManager:
    """Where variables are given their first values: not at each step of a graph."""
    return tf.init_scope()


def refuse_baking(what: str, remedy: str) -> None:
    """Nothing to refuse: a traced function reads a tf.Variable anew at each call."""
    return  # AutoGraph warns of a function that is a docstring alone.


def check_strategy(variables: Sequence[Any], built: bool) -> None:
    """Raises where replicas would disagree on the optimizer's variables."""
    context = tf.distribute.get_replica_context()
    if context is None:
        raise ValueError(
            "The optimizer must be applied in a replica context: call it within "
            "`strategy.run`. Received: a call in a cross-replica context."
        )
    if context.num_replicas_in_sync == 1:
        return
    # One variable for all replicas would be moved once by each of them.
    mirrored = context.strategy.extended.variable_created_in_scope
    for variable in variables:
        if not mirrored(variable.value):
            raise ValueError(
                "The optimizer must be created, and built, within "
                f"`strategy.scope()`. Received: its variable {variable.path} was "
                "created outside."
            )
    if not built and is_tracing():
        raise ValueError(
            "The optimizer must be built before a tf.function calls `strategy.run`. "
            "Received: one that is not. Within `strategy.scope()` call "
            "`optimizer.build(variables)`."
        )


@contextlib.contextmanager
def optimizer_scope(model: Any) -> Iterator[None]:
    """Where the variables of a model's optimizer are created: its strategy's scope.

    And outside of a trace, at whose second run it may be that layers become known.
    """
    strategy = model.distribute_strategy
    known = tf.distribute.has_strategy()
    with tf.init_scope(), contextlib.nullcontext() if known else strategy.scope():
        yield


def unscale(
    grads: Sequence[Any], inverse_scale: Any, variables: Sequence[Any] | None = None
) -> list[Any]:
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


def nonfinite(grads: Sequence[Any]) -> tf.Tensor:
    """The code of each gradient, of FINITE, INFINITE and NAN: int8, (len(grads),)."""
    grads = [_on_values(tf.convert_to_tensor, g) for g in grads]
    alike: dict[Any, list[int]] = {}
    for index, grad in enumerate(grads):
        alike.setdefault(_group(grad) or index, []).append(index)
    groups = list(alike.values())
    values = [_together([grads[i] for i in group]) for group in groups]

    def exactly() -> tf.Tensor:
        codes = tf.concat([_codes(v) for v in values], axis=0)
        return tf.gather(codes, np.argsort([i for g in groups for i in g]))

    if _compiled_by_xla():
        return _of_all_replicas(exactly())
    # The squares take one pass, in a single kernel. They overflow at 1.8e19: only then,
    # or where a gradient is not finite, is each looked at.
    squares = tf.add_n([_sum_of_squares(v) for v in values if v is not None])
    finite = tf.fill((len(grads),), tf.constant(FINITE, tf.int8))
    codes = tf.cond(tf.math.is_finite(squares), lambda: finite, exactly)
    return _of_all_replicas(codes)


def _compiled_by_xla() -> bool:
    """Whether XLA compiles what is being traced."""
    return GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


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


def _of_all_replicas(codes: tf.Tensor) -> tf.Tensor:
    """The highest of all replicas' codes."""
    if tf.distribute.get_replica_context().num_replicas_in_sync == 1:
        return codes
    # In one message, of flags: replicas sum what they know, and take no maximum.
    flags = _on_any_replica(tf.stack([codes == INFINITE, codes == NAN]))
    infinite, nan = tf.unstack(tf.cast(flags, tf.int8))
    return tf.maximum(INFINITE * infinite, NAN * nan)


def _on_any_replica(flags: tf.Tensor) -> tf.Tensor:
    """Whether a flag is set on any replica.

    Summed over all of them before anyone decides, and outside of any branch. Replicas
    that disagreed would wait for each other for ever.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return flags
    count = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(flags, tf.float32))
    return count > 0


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
    parted = rows.shape.is_fully_defined() and in_windows(rows.shape, first=1)
    if parted:
        shape, axis = parted
        rows = tf.reduce_max(tf.reshape(rows, shape), axis)
    codes = tf.clip_by_value(rows, _BELOW, _BELOW + NAN) - _BELOW
    codes = tf.cast(codes, tf.int8)
    largest = tf.reduce_max(codes, axis=range(1, codes.shape.rank))
    # Of no elements at all the maximum is the lowest integer.
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
_WRITING = threading.RLock()


def all_finite(codes: tf.Tensor) -> tf.Tensor:
    """Bool scalar: is each of the codes FINITE?"""
    # The square root keeps XLA from computing the whole reduction once more in each
    # of the selects that read the flag.
    return tf.sqrt(tf.reduce_sum(tf.cast(codes, tf.float32))) == 0


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
    selects = _compiled_by_xla() and not (sparse or tf.distribute.has_strategy())
    known = written() if selects else None
    if known is not None:
        with _written_where(finite, known):
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


@contextlib.contextmanager
def _written_where(predicate: tf.Tensor, variables: Iterable[Any]) -> Iterator[None]:
    """Lets variables meanwhile be written only where `predicate` is true.

    Selecting at each write, and not once after all, keeps XLA from computing a moment
    twice, for itself and for the weight.
    """
    # Keras names some variables twice.
    native = {id(v): v.value if isinstance(v, keras.Variable) else v for v in variables}
    with _WRITING, contextlib.ExitStack() as undone:
        for variable in native.values():
            # In place of the methods of their class, and of these variables alone.
            for name, method in _methods(variable, predicate).items():
                setattr(variable, name, method)
                undone.callback(delattr, variable, name)
        yield


def _methods(variable: Any, predicate: tf.Tensor) -> dict[str, Callable]:
    write, thread = variable.assign, threading.get_ident()
    # As it was before any write: fewer values live on at the same time.
    before = tf.identity(variable)

    def assign(value: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return write(value, *args, **kwargs)
        value = tf.convert_to_tensor(value, variable.dtype)
        return write(tf.where(predicate, value, before), *args, **kwargs)

    def assign_add(delta: Any, *args: Any, **kwargs: Any) -> Any:
        return assign(variable + delta, *args, **kwargs)

    def assign_sub(delta: Any, *args: Any, **kwargs: Any) -> Any:
        return assign(variable - delta, *args, **kwargs)

    return {"assign": assign, "assign_add": assign_add, "assign_sub": assign_sub}


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
        broken = skipped & _on_any_replica(~loss_is_finite(logs))
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
