"""Loss scaling on JAX: selects where each variable is written, no conditional."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax

from keras_mp.backends.jax.equations import compiled
from keras_mp.backends.jax.gradients import (
    all_finite,
    nonfinite,
    nonfinite_to_nan,
    unscale,
)
from keras_mp.backends.jax.selects import without_conditionals
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
    """Whether we are inside jax.jit (eager jax.grad does not count)."""
    # What JAX creates is a tracer only where a program is being recorded: jax.grad
    # outside jit computes such constants at once. This one takes the least time.
    return isinstance(lax.iota(np.int32, 1), jax.core.Tracer)


def outside_trace() -> contextlib.AbstractContextManager:
    """Where variables are given their first values; JAX creates none in a trace."""
    return contextlib.nullcontext()


def refuse_baking(what: str, remedy: str) -> None:
    """Raises where the variables' present values would become constants of a trace."""
    if not keras.src.backend.in_stateless_scope() and is_tracing():
        raise ValueError(
            f"`{what}` was called inside a function that JAX is tracing: the present "
            "loss scale would be baked into the program and never move again. "
            f"Call `{remedy}` instead."
        )


def check_strategy(variables: Sequence[Any], built: bool) -> None:
    """Nothing to check: only TensorFlow has strategies."""


def optimizer_scope(model: Any) -> contextlib.AbstractContextManager:
    """No scope: only TensorFlow has strategies."""
    return contextlib.nullcontext()


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


def update_if(
    finite: Any,
    update: Callable[[list[Any]], None],
    grads: list[Any],
    written: Callable[[], Sequence[Any] | None],
    branches: bool = False,
) -> None:
    """Runs `update(grads)`, whose writes take effect only if `finite`.

    `branches`: whether Keras puts conditionals into it, which then become selects.
    """
    if not isinstance(finite, jax.core.Tracer):
        if finite:
            update(grads)
        return

    def writes(finite: Any, before: dict[int, Any], grads: list[Any]) -> Any:
        with SelectingScope(finite, before) as scope:
            update(grads)
        return scope.state_mapping

    run = without_conditionals(writes) if branches else writes
    mapping = keras.src.backend.get_stateless_scope().state_mapping
    mapping.update(run(finite, mapping, grads))


def optimizer_values(args: Sequence[Any]) -> list[Any] | None:
    """The optimizer's state in the arguments of a `train_function`."""
    return args[0][2]


def undo_skipped(
    model: Any, optimizer: Any, step: Callable[..., tuple[Any, Any]]
) -> Callable[..., tuple[Any, Any]]:
    """Wraps a train step so that one which the optimizer skips leaves no trace.

    Non-trainable variables, metrics and the logs made of them are what they were, and
    so is the loss scale if the loss itself was not finite.
    """

    def undoing(state: Any, data: Any) -> tuple[Any, Any]:
        logs, after = step(state, data)
        place = {id(v): i for i, v in enumerate(optimizer.variables)}
        counter = place[id(optimizer.skip_counter)]
        skipped = after[2][counter] > state[2][counter]
        own = [place[id(v)] for v in optimizer.state_variables]
        blameless = optimizer.state_after_broken_step([state[2][i] for i in own])
        broken = skipped & ~loss_is_finite(logs)
        scaling = list(after[2])
        for index, value in zip(own, blameless, strict=True):
            scaling[index] = jnp.where(broken, value, scaling[index])
        non_trainable, metrics = (
            [
                # What the step did not write needs no select: frozen weights.
                new if new is old else jnp.where(skipped, old, new)
                for old, new in zip(state[part], after[part], strict=True)
            ]
            for part in (1, 3)
        )
        scope = zip(model.metrics_variables, metrics, strict=True)
        with keras.StatelessScope(list(scope)):
            results = model.get_metrics_result()
        logs = without_step(logs, results, skipped, any_measured(state[3]))
        scale = scaling[place[id(optimizer.dynamic_scale)]]
        underflow = optimizer.underflow_watch.take()
        logs = with_scale(model, logs, scale, scaling[counter], underflow)
        return logs, (after[0], non_trainable, scaling, metrics)

    return undoing


def build(model: Any, *args: Any) -> None:
    """Nothing to do: `fit` builds the model before the first step."""
