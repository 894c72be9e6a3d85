"""Loss scaling on JAX: selects where each variable is written, no conditional."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_mp.backend.logs import (
    any_measured,
    loss_is_finite,
    with_scale,
    without_step,
)
from keras_mp.backend.train_function import make_train_function

__all__ = [
    "build",
    "check_strategy",
    "is_tracing",
    "make_train_function",
    "none_of",
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
    """Whether we are inside jax.jit (eager jax.grad does not count)."""
    # What jnp creates is a tracer only where a program is being recorded: jax.grad
    # outside jit computes such constants at once.
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def outside_trace() -> contextlib.AbstractContextManager:
    """Where variables are given their first values; JAX creates none in a trace."""
    return contextlib.nullcontext()


def refuse_baking(what: str, remedy: str) -> None:
    """Raises where the variables' present values would become constants of a trace."""
    if is_tracing() and not keras.src.backend.in_stateless_scope():
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


def unscale(grads: Sequence[Any], inverse_scale: Any) -> list[Any]:
    """Multiplies each gradient by `inverse_scale` in float32; None stays None."""
    return _map_present(_unscale if is_tracing() else _unscale_jitted)(
        grads, inverse_scale
    )


def _unscale(grads: list[Any], inverse_scale: Any) -> list[Any]:
    return [_widened(g) * inverse_scale.astype(_wide_dtype(g)) for g in grads]


def poison(grads: Sequence[Any]) -> list[Any]:
    """Turns infinities into nan, which clipping by value cannot make finite again."""
    return _map_present(_poison if is_tracing() else _poison_jitted)(grads)


def _poison(grads: list[Any]) -> list[Any]:
    return [jnp.where(jnp.isfinite(g), g, jnp.nan) for g in grads]


_unscale_jitted = jax.jit(_unscale)
_poison_jitted = jax.jit(_poison)


def _map_present(function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Applies a function of a list to those gradients that are not None."""

    def mapped(grads: Sequence[Any], *args: Any) -> list[Any]:
        results = iter(function([g for g in grads if g is not None], *args))
        return [None if g is None else next(results) for g in grads]

    return mapped


def _wide_dtype(x: Any) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _widened(x: Any) -> Any:
    return x.astype(_wide_dtype(x))


def nonfinite(grads: Sequence[Any]) -> Any:
    """Which gradients hold an infinity, and which a nan: bool, (2, len(grads))."""
    return (_nonfinite if is_tracing() else _nonfinite_jitted)(list(grads))


def _nonfinite(grads: list[Any]) -> Any:
    # The bits of |x| order as integers do: infinity above all numbers, nan above it.
    # An integer maximum, unlike one of floats, cannot lose a nan.
    bits: dict[int, Any] = {}
    alike: dict[Any, list[int]] = {}
    for index, grad in enumerate(grads):
        if grad is None:
            bits[index] = jnp.zeros((), jnp.int32)
        elif grad.size > GROUPED_ELEMENTS:
            bits[index] = jnp.max(_bits(grad))
        else:
            alike.setdefault((grad.size, grad.dtype), []).append(index)
    for indices in alike.values():
        rows = jnp.stack([grads[i].ravel() for i in indices])
        largest = jnp.max(_bits(rows), axis=1, initial=0)
        bits.update(zip(indices, largest, strict=True))
    largest = jnp.stack([bits[i] for i in range(len(grads))])
    return jnp.stack([largest == _INFINITY, largest > _INFINITY])


def _bits(x: Any) -> Any:
    if x.dtype == jnp.float64:  # A large one would become infinite in float32.
        x = jnp.where(jnp.isfinite(x), 0, x)
    return jax.lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)


_INFINITY = 0x7F800000
_nonfinite_jitted = jax.jit(_nonfinite)


def none_of(flags: Any) -> Any:
    """Bool scalar: is none of the flags set?"""
    if not isinstance(flags, jax.core.Tracer):
        return not flags.any()
    # The square root keeps XLA from computing the whole reduction once more in each
    # of the selects that read the flag.
    return jnp.sqrt(jnp.sum(flags.astype(jnp.float32))) == 0


class SelectingScope(keras.StatelessScope):
    """A stateless scope inside another that writes only where `predicate` is true.

    Selecting at each write leaves no conditional in the program and no second copy of
    the state, wherever an optimizer writes from (`assign`, EMA, weight decay).
    """

    def __init__(self, predicate: Any, outer: keras.StatelessScope) -> None:
        super().__init__()
        self._predicate = predicate
        self._outer = outer
        self.state_mapping = dict(outer.state_mapping)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        kept = jnp.where(self._predicate, value, variable.value)
        super().add_update((variable, kept.astype(value.dtype)))

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._outer.state_mapping.update(self.state_mapping)


def update_if(
    finite: Any, update: Callable[[list[Any]], None], grads: list[Any]
) -> None:
    """Runs `update(grads)`, whose writes take effect only if `finite`."""
    if not isinstance(finite, jax.core.Tracer):
        if finite:
            update(grads)
        return
    with SelectingScope(finite, keras.src.backend.get_stateless_scope()):
        update(grads)


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
