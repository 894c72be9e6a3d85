"""Loss scaling on torch: eager, so a Python `if`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

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
    """Whether torch.compile is tracing us."""
    return torch.compiler.is_compiling()


def refuse_baking(what: str, remedy: str) -> None:
    """Nothing to refuse: a compiled function reads a tensor anew at each call."""


def unscale(grads: Sequence[Any], inverse_scale: Any) -> list[Any]:
    """Multiplies each gradient by `inverse_scale` in float32; None stays None."""
    return [
        None
        if g is None
        else g.to(torch.promote_types(g.dtype, torch.float32)) * inverse_scale
        for g in grads
    ]


def poison(grads: Sequence[Any]) -> list[Any]:
    """Turns infinities into nan, which clipping by value cannot make finite again."""
    return [
        None if g is None else torch.where(torch.isfinite(g), g, torch.nan)
        for g in grads
    ]


def all_finite(grads: Sequence[Any]) -> torch.Tensor:
    """Bool scalar: is every element of every gradient finite?"""
    flags = [torch.isfinite(g).all() for g in grads if g is not None]
    return torch.stack(flags).all()


def update_if(
    finite: torch.Tensor, update: Callable[[list[Any]], None], grads: list[Any]
) -> None:
    """Runs `update(grads)` if `finite`."""
    if finite:
        update(grads)


def make_train_function(
    model: Any, original: Callable, force: bool, wrap: Callable[[Callable], Callable]
) -> None:
    """Runs Keras' `make_train_function` and wraps what it made.

    Here Keras looks `train_step` up at each call, not once.
    """
    before = model.train_function
    original(model, force)
    if model.train_function is not before:
        model.train_function = wrap(model.train_function)


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
        variables = model.non_trainable_variables + model.metrics_variables
        before = [v.value.detach().clone() for v in variables]
        count = int(skips.value)
        logs = step(data)
        if int(skips.value) == count:
            return logs
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        results = model.get_metrics_result()
        return {name: results.get(name, log) for name, log in logs.items()}

    return undoing


def build(model: Any, *args: Any) -> None:
    """Nothing to do: `fit` builds the model before the first step."""
