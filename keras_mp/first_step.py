"""The first step of a train, test or predict function, which may fail for dtypes.

It is taken once more, with the same batch and the state as it was, if what failed can
go on in float32: see `policies/missing_kernels.py`.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from keras import ops

from keras_mp.backends import engine
from keras_mp.policies import missing_kernels
from keras_mp.policies.layers import state_of
from keras_mp.replaced import replaced
from keras_mp.traced.function import TracedFunction, is_asked_for, not_compiled
from keras_mp.types import Model


def wrap_make_function(original: Callable) -> Callable:
    """Wraps the method that makes a test or a predict function."""
    name = original.__name__.removeprefix("make_")

    def make(self: Any, force: bool = False) -> Any:
        _make_function(self, name, original, force)

    return make


def _make_function(model: Model, name: str, original: Callable, force: bool) -> None:
    before = getattr(model, name)
    step_name = name.replace("function", "step")
    is_traced = (force or before is None) and is_asked_for(model, step_name)
    with (
        # Its own object: JAX would take what was traced of an equal one.
        replaced("steps", model, {step_name: functools.partial}),
        not_compiled(model) if is_traced else contextlib.nullcontext(),
    ):
        original(model, force)
    made = getattr(model, name)
    if made is before:
        return
    # An eager step takes nothing, and interrupts need not wait for it.
    compiled = model.jit_compile and not model.run_eagerly
    step = engine.keeping_state(model, made) if compiled else made
    if is_traced:
        step = TracedFunction(model, step_name, step).call
    attaching = engine.attaching(model, step)

    @functools.wraps(made)
    def first(*args: Any) -> Any:
        result = take(model, name, attaching, *args)
        if getattr(model, name) is first:
            setattr(model, name, attaching)
        return result

    setattr(model, name, first)


def take(model: Model, name: str, function: Callable, *args: Any) -> Any:
    """Takes the step, once more if it fails for dtypes and that can be mended.

    Args:
        name: the attribute of the model that Keras has `function` in.
    """
    nothing = model.built and not missing_kernels.suspects(model)
    if nothing or engine.other_workers(model):
        return function(*args)
    current = function

    def take_one(batch: Any, state: Any, once: Callable) -> tuple[Any, Any]:
        nonlocal current
        changing = _changed_by_a_step(model) if state is None else []
        before = [(variable, ops.copy(variable.value)) for variable in changing]
        try:
            return once(state)
        except engine.dtype_errors as error:
            for variable, value in before:
                variable.assign(value)
            with engine.attached(model, state):
                if not missing_kernels.mended(model, error):
                    raise
            getattr(model, f"make_{name}")()  # An error in a trace takes it away.
            current = getattr(model, name)
        return once(state)

    if name == "predict_function":  # It joins the outputs of all batches of a call.
        *state, batches = args
        given = engine.repeatable(model, batches)

        def together(state: Any) -> tuple[Any, Any]:
            return current(*([] if state is None else [state]), given()), None

        return take_one(None, state[0] if state else None, together)[0]
    count = model.steps_per_execution
    return engine.run_by_batch(lambda *args: current(*args), args, count, take_one)


def _changed_by_a_step(model: Model) -> list[Any]:
    """The variables that a step writes before it updates weights."""
    weights = set(map(id, model.weights))
    seeds = [v for v in model.non_trainable_variables if id(v) not in weights]
    return [*state_of(model), *seeds, *model.metrics_variables]
