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

from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

import keras_mp.keras_private as private
from keras_mp.backends import engine
from keras_mp.loss_scaling.optimizer import loss_scaling_of
from keras_mp.loss_scaling.state import Counts


def call(model: Any, train_function: Callable, *args: Any) -> Any:
    """Calls a train function once, and repeats the steps that it skips."""
    if not _may_retake(model, engine.optimizer_values(args)):
        return train_function(*args)

    def take(batch: Any, state: Any, once: Callable) -> tuple[Any, Any]:
        return _until_applied(model, state, once)

    return engine.run_by_batch(train_function, args, model.steps_per_execution, take)


def _may_retake(model: Any, values: Sequence[Any] | None) -> bool:
    scaling = loss_scaling_of(model.optimizer)
    if scaling is None:
        # On TensorFlow the first step may build layers that need loss scaling.
        return not model.built
    if scaling.retakes and scaling.retake_steps is not None:
        applied = _counts(model.optimizer, values).applied
        scaling.retakes = applied < scaling.retake_steps
    return scaling.retakes and scaling.one_update


def _until_applied(model: Any, state: Any, once: Callable) -> tuple[Any, Any]:
    """Takes one step with one batch, see `Engine.run_by_batch`."""
    before = _counts(model.optimizer, _of(state))
    generators = engine.generator_states()
    first, state = once(state)
    optimizer = model.optimizer  # The first step may have wrapped it.
    after = _counts_after(before, optimizer, _of(state))
    scaling = loss_scaling_of(optimizer)
    if not _scale_was_too_high(before, after) or not scaling.one_update:
        return first, state
    own = [*scaling.variables, scaling.nonfinite_counts]
    after_one_skip = _values(optimizer, own, _of(state))
    counts_after_one_skip = after
    while _scale_was_too_high(before, after):
        engine.set_generator_states(generators)
        result, state = once(state)
        before, after = after, _counts_after(after, optimizer, _of(state))
    if after.skipped == before.skipped:
        return result, state
    scaling.counts = counts_after_one_skip
    if state is None:
        for variable, value in zip(own, after_one_skip, strict=True):
            variable.assign(value)
        return first, None
    values, places = _of(state), _places(optimizer)
    for variable, value in zip(own, after_one_skip, strict=True):
        values[places[id(variable)]] = value
    return (first[0], state), state


def _scale_was_too_high(before: Counts, after: Counts) -> bool:
    """Was a step skipped for a reason that a lower scale can remove?"""
    return after.skipped > before.skipped and after.broken == before.broken


def _counts(optimizer: Any, values: Sequence[Any] | None) -> Counts:
    """What Python knows about the steps so far, or else what the device says."""
    scaling = loss_scaling_of(optimizer)
    if scaling is None:
        return Counts(0, 0, 0)
    if scaling.counts is None:
        applied = private.applied_steps(optimizer.inner_optimizer)
        counters = [applied, scaling.skipped_steps, scaling.broken_steps]
        scaling.counts = Counts(*map(int, _values(optimizer, counters, values)))
    return scaling.counts


def _counts_after(
    before: Counts, optimizer: Any, values: Sequence[Any] | None
) -> Counts:
    """The counts after one more step; reads one number if the step was applied."""
    scaling = loss_scaling_of(optimizer)
    if scaling is None:
        return before
    after = before._replace(applied=before.applied + 1)
    if engine.may_have_skipped(scaling):
        (skipped,) = _values(optimizer, [scaling.skipped_steps], values)
        if int(skipped) > before.skipped:
            (broken,) = _values(optimizer, [scaling.broken_steps], values)
            after = before._replace(skipped=int(skipped), broken=int(broken))
    scaling.counts = after
    return after


def _of(state: Any) -> Any:
    return None if state is None else engine.optimizer_values((state,))


def _values(optimizer: Any, variables: Sequence[Any], values: Any) -> list[Any]:
    """Copies of their values; on JAX from the state that `fit` passes round."""
    if values is None:
        return [ops.copy(v.value) for v in variables]
    places = _places(optimizer)
    return [ops.copy(values[places[id(v)]]) for v in variables]


def _places(optimizer: Any) -> dict[int, int]:
    return {id(v): i for i, v in enumerate(optimizer.variables)}
