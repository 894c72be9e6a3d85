"""Loss scaling on torch: eager, so a Python `if`."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from keras_mp.backends.torch.gradients import (
    all_finite,
    highest_of_all_processes,
    nonfinite,
    nonfinite_to_nan,
    unscale,
)
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
    """Whether torch.compile is tracing us."""
    return torch.compiler.is_compiling()


def compiled(
    results: Callable, static: Sequence[int] = ()
) -> Callable[[Callable], Callable]:
    """The function itself: its lines cost little."""
    return lambda function: function


def outside_trace() -> contextlib.AbstractContextManager:
    """Where variables are given their first values; torch is eager anyway."""
    return contextlib.nullcontext()


def refuse_baking(what: str, remedy: str) -> None:
    """Nothing to refuse: a compiled function reads a tensor anew at each call."""


def check_strategy(variables: Sequence[Any], built: bool) -> None:
    """Nothing to check: only TensorFlow has strategies."""


def optimizer_scope(model: Any) -> contextlib.AbstractContextManager:
    """No scope: only TensorFlow has strategies."""
    return contextlib.nullcontext()


def update_if(
    finite: torch.Tensor,
    update: Callable[[list[Any]], None],
    grads: list[Any],
    written: Callable[[], Sequence[Any] | None],
    branches: bool = False,
) -> bool:
    """Runs `update(grads)` if `finite`; returns whether it is."""
    if finite:
        update(grads)
        return True
    return False


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
    model: Any, optimizer: Any, step: Callable[..., Any]
) -> Callable[..., Any]:
    """Wraps a train step so that one which the optimizer skips leaves no trace.

    Non-trainable variables, metrics and the logs made of them are what they were, and
    so is the loss scale if the loss itself was not finite. Frozen weights, which may be
    nearly all there are, are not copied unless the step assigns to them: what torch
    itself writes into one, past Keras, is not put back.
    """

    def undoing(data: Any) -> Any:
        frozen = _frozen_weights(model)
        changing = model.non_trainable_variables + model.metrics_variables
        before = {id(v): _with_value(v) for v in changing if id(v) not in frozen}
        # `apply` notes it where it skips; to read its counter waits for the device.
        optimizer.skip_watch.state_before_skip = None
        with _noting_writes(frozen.values(), before):
            logs = step(data)
        own = optimizer.skip_watch.state_before_skip
        if own is None:
            return told(logs)
        # All processes have skipped, so all are here to tell each other of their loss.
        if highest_of_all_processes((~loss_is_finite(logs)).to(torch.int8)):
            blameless = optimizer.state_after_broken_step(own)
            for variable, value in zip(
                optimizer.state_variables, blameless, strict=True
            ):
                variable.assign(value)
        for variable, value in before.values():
            variable.assign(value)
        measured = any_measured([v.value for v in model.metrics_variables])
        return told(without_step(logs, model.get_metrics_result(), True, measured))

    def told(logs: Any) -> Any:
        return with_scale(
            model,
            logs,
            optimizer.loss_scale,
            optimizer.skipped_steps,
            optimizer.underflow_watch.take(),
        )

    return undoing


def _with_value(variable: Any) -> tuple[Any, torch.Tensor]:
    # Not `value`, which is half precision within a layer's call.
    return variable, variable._value.detach().clone()


def _frozen_weights(model: Any) -> dict[int, Any]:
    """Weights that `trainable = False` on a layer keeps as they are, by their id."""
    layers = model._flatten_layers()
    weights = (v for layer in layers for v in layer._trainable_variables)
    return {id(v): v for v in weights if not v.trainable}


@contextlib.contextmanager
def _noting_writes(
    variables: Iterable[Any], before: dict[int, tuple[Any, torch.Tensor]]
) -> Iterator[None]:
    """Adds a variable and its value to `before`, by its id, where it is assigned to."""

    def noting(variable: Any) -> Callable[[Any], None]:
        write = variable._direct_assign

        def assign(value: Any) -> None:
            if id(variable) not in before:
                before[id(variable)] = _with_value(variable)
            write(value)

        return assign

    with contextlib.ExitStack() as undone:
        for variable in variables:
            # In place of the method of its class, and of this variable alone. A step
            # within a step finds that of the outer one.
            outer = vars(variable).get("_direct_assign")
            put_back = (setattr, variable, "_direct_assign", outer)
            remove = (delattr, variable, "_direct_assign")
            undone.callback(*(put_back if outer else remove))
            variable._direct_assign = noting(variable)
        yield


def build(model: Any, *args: Any) -> None:
    """Nothing to do: `fit` builds the model before the first step."""
