"""What keras_mp asks of TensorFlow: its parts, and the train step of `fit`."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

import keras_mp.keras_private as private
from keras_mp import interrupts
from keras_mp.backends.interface import HALF, Engine, Wrapper
from keras_mp.backends.step import Update
from keras_mp.backends.tensorflow import replicas
from keras_mp.backends.tensorflow.batches import TensorFlowBatches
from keras_mp.backends.tensorflow.measures import TensorFlowMeasures
from keras_mp.backends.tensorflow.step import TensorFlowStep
from keras_mp.backends.train_step import any_measured, logs_of_step, loss_is_finite
from keras_mp.types import Model, Variable


class TensorFlowEngine(TensorFlowStep, TensorFlowBatches, TensorFlowMeasures, Engine):
    """Steps are eager, graphs, or compiled by XLA, on one replica or several."""

    half_dtypes = frozenset((*HALF, tf.float16, tf.bfloat16))
    dtype_errors = (
        *Engine.dtype_errors,
        tf.errors.InvalidArgumentError,  # Two dtypes meet.
        tf.errors.NotFoundError,  # No such kernel exists.
        tf.errors.UnimplementedError,
    )

    def outside_trace(self) -> contextlib.AbstractContextManager:
        return tf.init_scope()

    @contextlib.contextmanager
    def optimizer_scope(self, model: Model) -> Iterator[None]:
        # Variables need the model's strategy, and must be created outside a trace: only
        # its second run may show which layers there are.
        strategy = model.distribute_strategy
        known = tf.distribute.has_strategy()
        with tf.init_scope(), contextlib.nullcontext() if known else strategy.scope():
            yield

    def make_train_function(
        self, model: Model, original: Callable, force: bool, wrap: Wrapper
    ) -> None:
        def traced(step: Callable) -> Callable:
            wrapped = wrap(step)

            @functools.wraps(wrapped)
            def train_step(*args: Any) -> Any:
                try:
                    return wrapped(*args)
                except BaseException:
                    # A tf.function creates variables in its first trace alone: after
                    # one that has failed, `fit` needs another function.
                    if not tf.executing_eagerly():
                        model.train_function = None
                    raise

            return train_step

        super().make_train_function(model, original, force, traced)

    def undo_skipped(self, model: Model, scaling: Any, step: Callable) -> Callable:
        def undoing(data: Any) -> Any:
            changing = model.non_trainable_variables + model.metrics_variables
            variables = {id(v): v.value for v in changing}
            before = [tf.identity(v) for v in variables.values()]
            measured = any_measured([v.value for v in model.metrics_variables])
            own = [v.value for v in scaling.variables]
            blameless = scaling.after_broken_step([tf.identity(v) for v in own])
            skips = tf.identity(scaling.skipped_steps.value)
            put_back = functools.partial(_put_back, variables.values())
            scaling.begin_step()
            try:
                logs = step(data)
                skipped = scaling.skipped_steps.value > skips
                self.update_if(skipped, Update(put_back, lambda: changing), before)
            except BaseException:
                # Half of a step: it has not been taken.
                if tf.executing_eagerly() and not scaling.applied:
                    with interrupts.held():
                        put_back(before)
                raise
            # Each replica knows only the loss of its own share of the batch.
            broken = skipped & replicas.on_any_replica(~loss_is_finite(logs))
            for variable, value in zip(own, blameless, strict=True):
                variable.assign(tf.where(broken, value, variable))

            def reset_new() -> None:
                # Keras on TensorFlow creates metrics' variables in the first step.
                for metric in model.metrics:
                    if any(id(v) not in variables for v in metric.variables):
                        metric.reset_state()

            tf.cond(skipped, reset_new, lambda: None)
            return logs_of_step(model, logs, scaling, skipped, measured)

        return undoing

    def calls_python(self) -> bool:
        if tf.executing_eagerly():
            return False
        operations = tf.compat.v1.get_default_graph().get_operations()
        return any(op.type in ("PyFunc", "EagerPyFunc") for op in operations)

    def build(self, model: Model, data: Any) -> None:
        # Keras on TensorFlow builds a model in the first step. The optimizer, and the
        # variables that a skipped step must not touch, are known once it is built.
        try:
            private.build_from_batch(model, data)
        except (RuntimeError, ValueError):
            # A model with a custom `train_step` may not build this way: leave it.
            pass


def _put_back(variables: Iterable[Variable], values: list[tf.Tensor]) -> None:
    """Gives variables their values back; each replica sets its own, without a sum."""

    def assign(strategy: Any, values: list[Any]) -> None:
        for variable, value in zip(variables, values, strict=True):
            strategy.extended.update(
                variable, lambda v, x: v.assign(x), args=(value,), group=False
            )

    tf.distribute.get_replica_context().merge_call(assign, args=(values,))


engine = TensorFlowEngine()
