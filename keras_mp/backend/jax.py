"""Loss scaling on JAX: selects where each variable is written, no conditional."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

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

# Gradients up to this many elements are checked together, so that the number of
# reductions does not grow with the number of variables.
GROUPED_ELEMENTS = 64 * 1024


def is_tracing() -> bool:
    """Whether we are inside jax.jit (eager jax.grad does not count)."""
    # What jnp creates is a tracer only where a program is being recorded: jax.grad
    # outside jit computes such constants at once.
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def refuse_baking(what: str, remedy: str) -> None:
    """Raises where the variables' present values would become constants of a trace."""
    if is_tracing() and not keras.src.backend.in_stateless_scope():
        raise ValueError(
            f"`{what}` was called inside a function that JAX is tracing: the present "
            "loss scale would be baked into the program and never move again. "
            f"Call `{remedy}` instead."
        )


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


def all_finite(grads: Sequence[Any]) -> Any:
    """Bool scalar: is every element of every gradient finite?"""
    present = [g for g in grads if g is not None]
    return (_all_finite if is_tracing() else _all_finite_jitted)(present)


def _all_finite(grads: list[Any]) -> Any:
    # x * 0 is 0 where x is finite and nan elsewhere, and a sum of those cannot
    # overflow as one of squares can.
    small = [g for g in grads if g.size <= GROUPED_ELEMENTS]
    sums = [jnp.sum(g * 0) for g in grads if g.size > GROUPED_ELEMENTS]
    if small:
        sums.append(jnp.sum(jnp.concatenate([_widened(g).ravel() for g in small]) * 0))
    # The square root keeps XLA from recomputing the whole reduction in each of the
    # selects that read the flag.
    return jnp.isfinite(jnp.sqrt(functools.reduce(jnp.add, sums)))


_all_finite_jitted = jax.jit(_all_finite)


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
    model: Any, skips: keras.Variable, step: Callable[..., tuple[Any, Any]]
) -> Callable[..., tuple[Any, Any]]:
    """Wraps a train step so that one which `skips` counts leaves no trace.

    Non-trainable variables, metrics and the logs made of them are what they were.
    """

    def undoing(state: Any, data: Any) -> tuple[Any, Any]:
        logs, after = step(state, data)
        index = next(i for i, v in enumerate(model.optimizer.variables) if v is skips)
        skipped = after[2][index] > state[2][index]
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
        logs = {
            name: jnp.where(skipped, results[name], log) if name in results else log
            for name, log in logs.items()
        }
        return logs, (after[0], non_trainable, after[2], metrics)

    return undoing


def build(model: Any, *args: Any) -> None:
    """Nothing to do: `fit` builds the model before the first step."""
