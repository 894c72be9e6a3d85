"""Loss scaling on TensorFlow: `tf.cond` in graphs, a Python `if` eagerly.

Where XLA compiles, selects: a conditional there copies what goes through it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

import keras_mp.keras_private as private
from keras_mp.backends import own_methods
from keras_mp.backends.interface import Engine, Update, Wrapper
from keras_mp.backends.repairs import arange, attention, broadcasting
from keras_mp.backends.tensorflow import (
    constants,
    devices,
    differentiation,
    gradients,
    products,
    replicas,
    rounding,
)
from keras_mp.backends.tensorflow import private as tensorflow_private
from keras_mp.backends.tensorflow.writes import written_where
from keras_mp.backends.train_step import any_measured, logs_of_step, loss_is_finite

# Of a dataset of one batch: to optimize it takes longer than to read it.
_AT_ONCE = tf.data.Options()
_AT_ONCE.autotune.enabled = False
_AT_ONCE.experimental_optimization.apply_default_optimizations = False


class TensorFlowEngine(Engine):
    """Steps are eager, graphs, or compiled by XLA; on one replica or several."""

    unscale = staticmethod(gradients.unscale)
    nonfinite_to_nan = staticmethod(gradients.nonfinite_to_nan)
    nonfinite = staticmethod(gradients.nonfinite)
    all_finite = staticmethod(gradients.all_finite)
    check_strategy = staticmethod(replicas.check_strategy)
    refuse_replicas = staticmethod(replicas.refuse_replicas)
    plain_updates = staticmethod(own_methods.plain_updates)
    scope = staticmethod(constants.scope)
    constants = staticmethod(constants.constants)
    differentiate = staticmethod(differentiation.differentiate)
    stochastic_rounding = staticmethod(rounding.stochastic_rounding)
    list_devices = staticmethod(devices.list_devices)
    measure_memory = staticmethod(devices.measure_memory)
    half_products = " where XLA compiles"
    dtype_errors = (
        *Engine.dtype_errors,
        tf.errors.InvalidArgumentError,  # Two dtypes meet.
        tf.errors.NotFoundError,  # There is no such kernel.
        tf.errors.UnimplementedError,
    )
    why_no_memory = "TensorFlow counts the memory of GPUs alone"

    def is_tracing(self) -> bool:
        """Are we inside a tf.function that is being traced?"""
        return not tf.executing_eagerly()

    def outside_trace(self) -> contextlib.AbstractContextManager:
        return tf.init_scope()

    @contextlib.contextmanager
    def optimizer_scope(self, model: Any) -> Iterator[None]:
        # The strategy of the model; and outside of a trace, whose second run may be the
        # one that shows which layers there are.
        strategy = model.distribute_strategy
        known = tf.distribute.has_strategy()
        with tf.init_scope(), contextlib.nullcontext() if known else strategy.scope():
            yield

    def update_if(self, finite: Any, update: Update, grads: list[Any]) -> bool | None:
        if tf.executing_eagerly() and not tf.distribute.has_strategy():
            return super().update_if(finite, update, grads)
        # A sparse gradient writes some rows of a table: a select would read them all.
        sparse = any(isinstance(g, tf.IndexedSlices) for g in grads)
        selects = gradients.compiled_by_xla() and not (
            sparse or tf.distribute.has_strategy()
        )
        known = update.written() if selects else None
        if known is not None:
            with written_where(finite, known):
                update.run(grads)
            return None
        if tensorflow_private.supports_no_merge_call():
            tf.cond(finite, lambda: update.run(grads), lambda: None)
            return None

        def across_replicas(strategy: Any, finite: Any, grads: Any) -> None:
            # All replicas agree, so the first one's flag is everyone's. The branch
            # stands in the cross-replica context: the update itself calls merge_call.
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

    def undo_skipped(self, model: Any, scaling: Any, step: Callable) -> Callable:
        def undoing(data: Any) -> Any:
            changing = model.non_trainable_variables + model.metrics_variables
            variables = {id(v): v.value for v in changing}
            before = [tf.identity(v) for v in variables.values()]
            measured = any_measured([v.value for v in model.metrics_variables])
            own = [v.value for v in scaling.variables]
            blameless = scaling.after_broken_step([tf.identity(v) for v in own])
            skips = tf.identity(scaling.skipped_steps.value)
            logs = step(data)
            skipped = scaling.skipped_steps.value > skips
            # The loss of a replica's own share of the batch.
            broken = skipped & replicas.on_any_replica(~loss_is_finite(logs))
            for variable, value in zip(own, blameless, strict=True):
                variable.assign(tf.where(broken, value, variable))
            put_back = functools.partial(_put_back, variables.values())
            self.update_if(skipped, Update(put_back, lambda: changing), before)

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

    def build(self, model: Any, data: Any) -> None:
        # Keras on TensorFlow leaves it to the first step. The optimizer, and the
        # variables that a skipped step must not touch, are known once it is built.
        try:
            private.build_from_batch(model, data)
        except (RuntimeError, ValueError):
            # A model that cannot be built so, of a `train_step` of the user's: let it.
            pass

    def contents(self, batch: Any) -> Any:
        def value(x: Any) -> Any:
            # How Keras passes a None through tf.data.
            return None if isinstance(x, tf.experimental.Optional) else x

        return keras.tree.map_structure(value, batch)

    def only(self, batch: Any, iterator: Any) -> Any:
        if not isinstance(iterator, tf.data.Iterator):
            return iter([batch])  # Of `train_on_batch`, not of `fit`.
        # An iterator of the same specification, or the function is traced anew, for
        # the shape of this batch.
        dataset = tf.data.Dataset.from_tensors(batch).with_options(_AT_ONCE)
        variant = tf.data.experimental.to_variant(dataset)
        return iter(tf.data.experimental.from_variant(variant, iterator.element_spec))

    def other_workers(self, model: Any) -> str:
        strategy = model.distribute_strategy
        if tf.distribute.has_strategy() or strategy is not tf.distribute.get_strategy():
            return f"a model under {type(strategy).__name__}"
        return ""

    def repairs(self) -> dict[str, Wrapper]:
        return {
            "dot_product_attention": attention.scaled_first,
            "arange": arange.made_in_float32,
            **broadcasting.repairs(gradients.is_summed_in_half),
            **products.repairs(),
        }


def _put_back(variables: Iterable[Any], values: list[tf.Tensor]) -> None:
    """Gives variables their values, each replica its own: none are added up."""

    def assign(strategy: Any, values: list[Any]) -> None:
        for variable, value in zip(variables, values, strict=True):
            strategy.extended.update(
                variable, lambda v, x: v.assign(x), args=(value,), group=False
            )

    tf.distribute.get_replica_context().merge_call(assign, args=(values,))


engine = TensorFlowEngine()
