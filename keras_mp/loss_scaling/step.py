"""A step of an optimizer: prepare, decide, write, with plain values between them.

prepare   which gradients are there, and what shows whether they are finite?
decide    is the step applied, and what does loss scaling remember about it?
write     the inner optimizer's update, or none; then the new scale and counters
"""

import contextlib
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

import keras_mp.keras_private as private
from keras_mp import interrupts
from keras_mp.backends import engine
from keras_mp.backends.step import FINITE, Update
from keras_mp.loss_scaling import gradients
from keras_mp.loss_scaling.inner_optimizer import written_by
from keras_mp.loss_scaling.nonfinite import counted
from keras_mp.loss_scaling.schedule import LossScaleRule, LossScaleState
from keras_mp.loss_scaling.state import LossScaling
from keras_mp.types import Gradients, Optimizer, Tensor, Variable, Variables


class Prepared(NamedTuple):
    """The gradients of a step.

    Attributes:
        variables: those to update.
        grads: one for each of them.
        scaled: whether the loss scale is still in `grads`, and is divided out where
            they are written.
        checked: what has to be finite, None where there is nothing: one for each
            gradient, the square of their norm, the loss.
        found: what was found in them already, see `Engine.check`.
        accumulates: whether the inner optimizer accumulates them, or one within it.
    """

    variables: list[Any]
    grads: list[Any]
    scaled: bool
    checked: list[Any]
    found: Any
    accumulates: bool


class Decision(NamedTuple):
    """The outcome of a step.

    Attributes:
        finite: whether it is applied: a bool where Python may know, else a bool scalar.
        after: variables of loss scaling, each with its value after the step.
    """

    finite: Any
    after: list[tuple[keras.Variable, Any]]


def prepare(
    scaling: LossScaling,
    inner: Optimizer,
    grads: list[Tensor],
    variables: list[Variable],
    loss: Tensor,
) -> Prepared:
    """Unscales the gradients, unless that can wait, and says what is to be checked."""
    scaled = scaling.stage.take(engine.is_tracing(), inner.name)
    found = None
    if scaled:
        if scaling.underflow.watched:
            scaling.underflow.look(grads, variables)
        scale = scaling.scale.value
        if not gradients.stay_finite(variables, inner, scaling.rule.min_scale):
            grads, scaled = gradients.unscaled(grads, variables, scale), False
        else:
            # Otherwise `write` unscales: there TensorFlow's graphs reuse their memory.
            in_place = gradients.unscaled_in_place(grads, variables, scale)
            if in_place is not None:
                (grads, found), scaled = in_place, False
    narrow = gradients.as_variables(grads, variables)
    accumulates = any(part.gradient_accumulation_steps for part in scaling.parts)
    if accumulates:
        # Keras adds them to accumulators of that dtype, in branches of a `cond`, where
        # neither JAX nor TensorFlow adds float32 to float16.
        grads = narrow
    if loss is not None:
        loss = ops.convert_to_tensor(loss)
    checked, norm = gradients.checked_for(narrow, variables, inner)
    checked = [*checked, norm, loss]
    return Prepared(variables, grads, scaled, checked, found, accumulates)


def decide(scaling: LossScaling, optimizer: Optimizer, prepared: Prepared) -> Decision:
    """Is everything finite that has to be? The scale and the counters follow."""
    finite, codes = engine.check(prepared.checked, prepared.found)
    if not engine.is_tracing() and private.get_stateless_scope() is None:
        finite = bool(finite)
    if finite is True:  # There is nothing to count.
        return applied(scaling)
    counts = scaling.nonfinite_counts
    values = _after_counted_step(
        scaling.rule,
        _state(scaling),
        finite,
        _in_columns(codes, optimizer, prepared.variables, counts.shape[1]),
        counts.value,
        private.applied_steps(optimizer.inner_optimizer).value,
    )
    variables = (*scaling.variables, counts)
    return Decision(finite, list(zip(variables, values, strict=True)))


def applied(scaling: LossScaling) -> Decision:
    """The decision if everything is finite."""
    state = _state(scaling)
    after = _after_finite_step(scaling.rule, state)
    pairs = zip(scaling.variables, after, state, strict=True)
    return Decision(True, [(v, new) for v, new, old in pairs if new is not old])


def write(
    scaling: LossScaling, inner: Optimizer, prepared: Prepared, decision: Decision
) -> None:
    """Updates the variables if the step is applied, and loss scaling's state always."""
    variables = prepared.variables

    def run(grads: Gradients) -> None:
        if prepared.scaled:
            grads = gradients.unscaled(grads, variables, scaling.scale.value)
        inner.apply(grads, variables)

    update = Update(run, lambda: written_by(inner, variables), prepared.accumulates)
    with contextlib.nullcontext() if engine.is_tracing() else interrupts.held():
        scaling.note(engine.update_if(decision.finite, update, prepared.grads))
        for variable, value in decision.after:
            variable.assign(value)


def _state(scaling: LossScaling) -> LossScaleState:
    return LossScaleState(*(v.value for v in scaling.variables))


def _in_columns(
    codes: Any, optimizer: Optimizer, variables: Variables, number: int
) -> Any:
    """The codes in the order in which the optimizer was built with its variables."""
    places = [private.index_in(optimizer, v) for v in variables]
    if places == list(range(number)):
        return codes
    columns = ops.one_hot(places, number, dtype="int8")
    known = ops.max(codes[: len(places), np.newaxis] * columns, axis=0)
    return ops.concatenate([known, codes[len(places) :]])


def _after_finite_step(rule: LossScaleRule, state: LossScaleState) -> LossScaleState:
    return rule.next(state, True)


def _after_counted_step(
    rule: LossScaleRule,
    state: LossScaleState,
    finite: Tensor,
    codes: Any,
    counts: Any,
    applied: Any,
) -> tuple[Any, ...]:
    counts = counted(counts, codes, applied, state.skipped_steps)
    return *rule.next(state, finite, ops.equal(codes[-1], FINITE)), counts


_after_finite_step = engine.compiled(_after_finite_step, static=(0,))
_after_counted_step = engine.compiled(_after_counted_step, static=(0,))
