"""What keras_mp asks of JAX: its parts, and the train step of `fit`."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_mp import interrupts
from keras_mp.backends.interface import HALF, Engine, Wrapper
from keras_mp.backends.jax import compilation, interruptible
from keras_mp.backends.jax.batches import JaxBatches
from keras_mp.backends.jax.measures import JaxMeasures
from keras_mp.backends.jax.step import JaxStep
from keras_mp.backends.train_step import any_measured, logs_of_step, loss_is_finite
from keras_mp.types import Model


class JaxEngine(JaxStep, JaxBatches, JaxMeasures, Engine):
    """Steps are traced, so Python cannot decide anything in them."""

    differentiates_in_outputs = False

    compiled = staticmethod(compilation.compiled)
    ends_whole = staticmethod(interruptible.ends_with_values)
    half_dtypes = frozenset((*HALF, jnp.dtype("float16"), jnp.dtype("bfloat16")))
    float32_in_cudnn = (keras.layers.LSTM,)

    def outside_trace(self) -> contextlib.AbstractContextManager:
        return jax.ensure_compile_time_eval()

    def trainable_values(self, model: Model, args: Sequence[Any]) -> list[Any]:
        return args[0][0]

    def optimizer_values(self, args: Sequence[Any]) -> list[Any] | None:
        return args[0][2]

    def make_train_function(
        self, model: Model, original: Callable, force: bool, wrap: Wrapper
    ) -> None:
        def traced(step: Callable) -> Callable:
            wrapped = wrap(step)

            @functools.wraps(wrapped)
            def train_step(*args: Any) -> Any:
                # Until it is compiled, a step takes nothing.
                with interrupts.let_through():
                    return wrapped(*args)

            return train_step

        super().make_train_function(model, original, force, traced)

    def undo_skipped(self, model: Model, scaling: Any, step: Callable) -> Callable:
        def undoing(state: Any, data: Any) -> tuple[Any, Any]:
            logs, after = step(state, data)
            place = {id(v): i for i, v in enumerate(model.optimizer.variables)}
            counter = place[id(scaling.skipped_steps)]
            skipped = after[2][counter] > state[2][counter]
            own = {place[id(v)]: v for v in scaling.variables}
            blameless = scaling.after_broken_step([state[2][i] for i in own])
            broken = skipped & ~loss_is_finite(logs)
            optimizer = list(after[2])
            for index, value in zip(own, blameless, strict=True):
                optimizer[index] = jnp.where(broken, value, optimizer[index])
            non_trainable, metrics = (
                [
                    # Values that the step did not write need no select: frozen weights.
                    new if new is old else jnp.where(skipped, old, new)
                    for old, new in zip(state[part], after[part], strict=True)
                ]
                for part in (1, 3)
            )
            values = [
                *zip(model.metrics_variables, metrics, strict=True),
                *((variable, optimizer[index]) for index, variable in own.items()),
            ]
            with keras.StatelessScope(values):
                measured = any_measured(state[3])
                logs = logs_of_step(model, logs, scaling, skipped, measured)
            return logs, (after[0], non_trainable, optimizer, metrics)

        return undoing


engine = JaxEngine()
