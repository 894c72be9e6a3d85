"""Repeats a skipped step of `fit` with the same batch, until it is applied.

A skipped step changes nothing but the scale, so the next try is what the step would
have been at the lower scale: no batch is lost to a first scale that is too high.

If the lowest scale does not help either, or the loss is not finite, the batch is to
blame. It is skipped, and the scale is what it is after one skip.

Measured and rejected: backing off by more than half (one halving is mostly enough);
choosing the first scale by a pass in bfloat16 (2^17 for a regression that needs 2^8 by
its 60th step); retrying inside the program (twice the operations); growing only where
there is headroom (half of the later skips, but other scales than Keras').
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

import keras_mp.keras_private as private
from keras_mp.backends import engine
from keras_mp.loss_scaling.optimizer import loss_scaling_of
from keras_mp.types import Model, Optimizer, Variables


def call(model: Model, train_function: Callable, *args: Any) -> Any:
    """Calls a train function once, and repeats the steps that it skips."""
    if not _may_retake(model, engine.optimizer_values(args)):
        return train_function(*args)

    def take(batch: Any, state: Any, once: Callable) -> tuple[Any, Any]:
        return _until_applied(model, state, once)

    return engine.run_by_batch(train_function, args, model.steps_per_execution, take)


def _may_retake(model: Model, values: Sequence[Any] | None) -> bool:
    scaling = loss_scaling_of(model.optimizer)
    if scaling is None:
        # On TensorFlow the first step may build layers that need loss scaling.
        return not model.built
    if scaling.retakes and scaling.retake_steps is not None:
        if scaling.batches is None:
            applied = private.applied_steps(model.optimizer.inner_optimizer)
            scaling.batches = int(_values(model.optimizer, [applied], values)[0])
        scaling.retakes = scaling.batches < scaling.retake_steps
    return scaling.retakes and scaling.one_update


def _until_applied(model: Model, state: Any, once: Callable) -> tuple[Any, Any]:
    """Takes one step with one batch, see `Engine.run_by_batch`."""
    before = _skips(model.optimizer, state)
    first, state = once(state)
    optimizer = model.optimizer  # The first step may have wrapped it.
    scaling = loss_scaling_of(optimizer)
    if scaling is None:
        return first, state
    if scaling.batches is not None:
        scaling.batches += 1
    outcome = _outcome(optimizer, before, state)
    if outcome is not Outcome.SKIPPED or not scaling.one_update:
        return first, state
    own = [*scaling.variables, scaling.nonfinite_counts]
    after_one_skip = _values(optimizer, own, _of(state))
    while outcome is Outcome.SKIPPED:
        before = _skips(optimizer, state)
        result, state = once(state)
        outcome = _outcome(optimizer, before, state)
    if outcome is Outcome.APPLIED:
        return result, state
    if state is None:
        for variable, value in zip(own, after_one_skip, strict=True):
            variable.assign(value)
        return first, None
    values, places = _of(state), _places(optimizer)
    for variable, value in zip(own, after_one_skip, strict=True):
        values[places[id(variable)]] = value
    return (first[0], state), state


class Outcome(enum.Enum):
    """What became of a step."""

    APPLIED = "applied"
    SKIPPED = "skipped, and a lower scale can help"
    BROKEN = "skipped, and no scale can help"


def _outcome(optimizer: Optimizer, before: Sequence[Any], state: Any) -> Outcome:
    """Compares the counters after a step with those just before it.

    Others may have taken steps since the last one: a callback, for instance. Reads one
    number if the step was applied, and none if Python knows that it was.
    """
    scaling: Any = loss_scaling_of(optimizer)
    if not engine.may_have_skipped(scaling):
        return Outcome.APPLIED
    skipped, broken = _skips(optimizer, state)
    if int(skipped) == int(before[0]):
        return Outcome.APPLIED
    broken = int(broken) > int(before[1])
    return Outcome.BROKEN if broken else Outcome.SKIPPED


def _skips(optimizer: Optimizer, state: Any) -> Sequence[Any]:
    """How many steps were skipped, and how many of these were broken, so far."""
    scaling = loss_scaling_of(optimizer)
    if scaling is None:
        return 0, 0
    return _values(optimizer, [scaling.skipped_steps, scaling.broken_steps], _of(state))


def _of(state: Any) -> Any:
    return None if state is None else engine.optimizer_values((state,))


def _values(optimizer: Optimizer, variables: Variables, values: Any) -> list[Any]:
    """Copies of their values; on JAX from the state that `fit` passes round."""
    if values is None:
        return [ops.copy(v.value) for v in variables]
    places = _places(optimizer)
    return [ops.copy(values[places[id(v)]]) for v in variables]


def _places(optimizer: Optimizer) -> dict[int, int]:
    return {id(v): i for i, v in enumerate(optimizer.variables)}
