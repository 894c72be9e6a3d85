"""Loss scaling on JAX: selects where each variable is written, no conditional."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax import lax

import keras_mp.keras_private as private
from keras_mp.backends.interface import Engine, Update, Wrapper
from keras_mp.backends.jax import (
    activations,
    attention,
    compilation,
    constants,
    cross_entropy,
    devices,
    differentiation,
    gradients,
    logits,
    moments,
    products,
    recurrent,
    rounding,
)
from keras_mp.backends.jax.selects import without_conditionals
from keras_mp.backends.products import number_of_chunks
from keras_mp.backends.repairs import broadcasting
from keras_mp.backends.train_step import any_measured, logs_of_step, loss_is_finite


class SelectingScope(keras.StatelessScope):
    """A stateless scope that writes only where `predicate` is true.

    Selecting at each write leaves no conditional in the program and no second copy of
    the state, wherever an optimizer writes from (`assign`, EMA, weight decay).
    """

    def __init__(self, predicate: Any, state_mapping: dict[int, Any]) -> None:
        super().__init__()
        # Once for each shape: XLA reads every line.
        self._predicate_for = functools.cache(
            functools.partial(lax.broadcast, predicate)
        )
        self._before = state_mapping
        self.state_mapping = dict(state_mapping)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        # As it was before any write: fewer values live on at the same time.
        kept = self._before.get(id(variable), variable.value)
        kept = lax.convert_element_type(kept, value.dtype)
        sharding = jax.typeof(value).sharding
        predicate = self._predicate_for(value.shape, out_sharding=sharding)
        super().add_update((variable, lax.select_n(predicate, kept, value)))


class JaxEngine(Engine):
    """Steps are traced: nothing may be decided in Python there."""

    is_tracing = staticmethod(compilation.is_tracing)
    compiled = staticmethod(compilation.compiled)
    unscale = staticmethod(gradients.unscale)
    nonfinite_to_nan = staticmethod(gradients.nonfinite_to_nan)
    nonfinite = staticmethod(gradients.nonfinite)
    all_finite = staticmethod(gradients.all_finite)
    scope = staticmethod(constants.scope)
    constants = staticmethod(constants.constants)
    differentiate = staticmethod(differentiation.differentiate)
    note_logits = staticmethod(logits.note_outputs)
    number_of_chunks = staticmethod(number_of_chunks)
    float32_in_cudnn = (keras.layers.LSTM,)
    stochastic_rounding = staticmethod(rounding.stochastic_rounding)
    list_devices = staticmethod(devices.list_devices)
    measure_memory = staticmethod(devices.measure_memory)
    why_no_memory = "JAX has compiled no `train_step`, whose memory it would know"

    def outside_trace(self) -> contextlib.AbstractContextManager:
        return jax.ensure_compile_time_eval()

    def refuse_baking(self, what: str, remedy: str) -> None:
        if private.get_stateless_scope() is None and compilation.is_tracing():
            raise ValueError(
                f"`{what}` was called inside a function that JAX is tracing: the "
                "present loss scale would be baked into the program and never move "
                f"again. Call `{remedy}` instead."
            )

    def update_if(self, finite: Any, update: Update, grads: list[Any]) -> bool | None:
        if not isinstance(finite, jax.core.Tracer):
            return super().update_if(finite, update, grads)

        def writes(finite: Any, before: dict[int, Any], grads: list[Any]) -> Any:
            with SelectingScope(finite, before) as scope:
                update.run(grads)
            return scope.state_mapping

        run = without_conditionals(writes) if update.branches else writes
        mapping = private.get_stateless_scope().state_mapping
        mapping.update(run(finite, mapping, grads))
        return None

    def optimizer_values(self, args: Sequence[Any]) -> list[Any] | None:
        return args[0][2]

    def undo_skipped(self, model: Any, scaling: Any, step: Callable) -> Callable:
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
                    # What the step did not write needs no select: frozen weights.
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

    def only(self, batch: Any, iterator: Any) -> Any:
        return iter([batch])

    def take_step(self, model: Any, batch: Any) -> None:
        private.build_from_batch(model, batch)
        model.make_train_function()
        parts = _parts(model)
        state = tuple([v.value for v in variables] for variables in parts.values())
        _, state = model.train_function(state, iter([batch]))
        private.attach_state(model, dict(zip(parts, state, strict=True)))

    @contextlib.contextmanager
    def attached(self, model: Any, state: Any) -> Iterator[None]:
        parts = _parts(model)
        private.attach_state(model, dict(zip(parts, state, strict=True)))
        try:
            yield
        finally:
            # As `fit` has left them: it goes on with the state.
            private.detach_state(model, parts)

    def repairs(self) -> dict[str, Wrapper]:
        return {
            "dot_product_attention": attention.chosen_by_device,
            **logits.repairs(broadcasting.repairs(gradients.is_summed_in_half)),
            **products.repairs(),
            **cross_entropy.repairs(),
            **activations.repairs(),
            **moments.repairs(),
            **recurrent.repairs(),
        }

    def other_workers(self, model: Any) -> str:
        processes = jax.process_count()
        return f"{processes} processes" if processes > 1 else ""


def _parts(model: Any) -> dict[str, list[Any]]:
    """The variables whose values `fit` passes round, in its order."""
    return {
        "trainable_variables": model.trainable_variables,
        "non_trainable_variables": model.non_trainable_variables,
        "optimizer_variables": model.optimizer.variables,
        "metrics_variables": model.metrics_variables,
    }


engine = JaxEngine()
