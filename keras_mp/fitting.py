"""What `fit` does around a step: it watches, undoes, repeats and stops.

The train step is wrapped where it is traced, the train function where it is called.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp import compiling, first_step
from keras_mp.backends import engine
from keras_mp.backends.train_step import any_measured, next_calls
from keras_mp.loss_scaling import retaking, stage, unwrapped
from keras_mp.loss_scaling.optimizer import loss_scaling_of
from keras_mp.loss_scaling.wrapping import watched_for_underflow, wrap_optimizers
from keras_mp.policies.reach import warn_of_unreached
from keras_mp.sharding import warn_of_torchs_own
from keras_mp.still_kernels import KernelWatch
from keras_mp.traced.function import TracedFunction, is_asked_for, not_compiled
from keras_mp.types import Model

# The mark of a train function that was made with what is ours.
_OURS = "_keras_mp"


def wrap_make_train_function(original: Callable) -> Callable:
    """Makes the train function by Keras' `original`, with what is ours around it."""

    def make_train_function(self: Any, force: bool = False) -> Any:
        _make_train_function(self, original, force)

    return make_train_function


def _make_train_function(model: Model, original: Callable, force: bool) -> None:
    compiling.make_up(model)
    # Layers that a subclassed model builds at its first call are known only now.
    wrap_optimizers(model)
    if engine.shards:
        warn_of_torchs_own(model)
    private.record_shardings(model)
    next_calls.pop(model, None)  # Left by a `fit` that an exception has ended.
    scaling = loss_scaling_of(model.optimizer)
    if scaling is not None:
        scaling.begin_fit()
    before = model.train_function
    if scaling is not None and before is not None and not hasattr(before, _OURS):
        # Made while no seam was in, it does not undo a step. Or it is the user's.
        force = force or private.is_keras_own(before)
    wrap = functools.partial(_train_step, model)
    is_made = force or before is None
    is_traced = is_made and is_asked_for(model, "train_step")
    with not_compiled(model) if is_traced else contextlib.nullcontext():
        engine.make_train_function(model, original, force, wrap)
    if model.train_function is not before:
        if is_traced:
            step = TracedFunction(model, "train_step", model.train_function)
            model.train_function = step.call
        _watch_skips(model)


def _train_step(model: Model, original: Callable) -> Callable:
    # A `train_step` of the user's may call the model with anything.
    function = getattr(original, "__func__", None)
    keras_own = function is inspect.getattr_static(keras.Model, "train_step")

    built = examined = False

    @functools.wraps(original)
    def train_step(*args: Any) -> Any:
        nonlocal built, examined
        # Only on TensorFlow: elsewhere Keras has built the model by now. Once it is
        # built, nobody looks again.
        built = built or all(layer.built for layer in private.layers_in(model))
        if not built and keras_own:
            engine.build(model, args[-1])  # On JAX the first is the state.
            wrap_optimizers(model)
        step = original
        scaling = loss_scaling_of(model.optimizer)
        if scaling is not None:
            scaling.underflow.watch(watched_for_underflow(model))
            step = engine.undo_skipped(model, scaling, original)
        if built or keras_own:
            with stage.train_step() as updates:
                result = step(*args)
        else:
            with unwrapped.postponed():
                with stage.train_step() as updates:
                    result = step(*args)
                # What the step has built is known now, and TensorFlow traces it again.
                wrap_optimizers(model)
        if scaling is not None:
            one_update = updates == [model.optimizer]
            scaling.one_update = one_update and not engine.calls_python()
        examined = examined or warn_of_unreached(model)
        return result

    return train_step


def _watch_skips(model: Model) -> None:
    """Makes `fit` warn of a run that only skips, stop it, or repeat a step.

    Looks only every few steps, because a look waits for the device, and before a step:
    after one, JAX has donated the state that `fit` goes back to.
    """
    keras_own = model.train_function
    train_function = engine.keeping_state(model, keras_own)
    retaking_it = functools.partial(retaking.call, model, train_function)
    kernels = KernelWatch(model)
    calls, first = 0, True

    def step(*args: Any) -> Any:
        nonlocal calls, first
        # Read anew: the first step may have wrapped it.
        scaling = loss_scaling_of(model.optimizer)
        if scaling is not None:
            if calls >= scaling.skips.interval:
                calls = 0  # After an error as well: `fit` may go on with better data.
                model.optimizer.raise_if_diverged(engine.optimizer_values(args))
            calls += 1
            scaling.steps_to_measure = True
        retakes = scaling is None or scaling.retakes
        once = retaking_it if retakes else train_function
        if not kernels.done:
            once = kernels.around(once, args)
        if first:
            first = False
            once = functools.partial(first_step.take, model, "train_function", once)
        reference = next_calls.pop(model, None) if next_calls else None
        made_by = reference and reference()
        return made_by(once, args) if made_by else once(*args)

    attaching = engine.attaching(model, step)
    model.train_function = functools.wraps(keras_own)(attaching)
    setattr(model.train_function, _OURS, True)


def wrap_get_metrics_result(original: Callable) -> Callable:
    """Wraps the results of the metrics."""

    def get_metrics_result(self: Any) -> Any:
        results = original(self)
        in_a_step = engine.is_tracing() or stage.in_train_step()
        return results if in_a_step else _measured(self, results)

    return get_metrics_result


def _measured(model: Model, results: dict[str, Any]) -> dict[str, Any]:
    """The results of the metrics; none if all steps since their reset were skipped.

    They would be 0, the best loss that a ModelCheckpoint ever sees. Without results
    Keras takes the logs of the last step, which are about that step.
    """
    optimizer: Any = getattr(model, "optimizer", None)
    scaling = loss_scaling_of(optimizer)
    if scaling is None or not scaling.steps_to_measure:
        return results
    scaling.steps_to_measure = False  # `evaluate` comes next, which takes no steps.
    only_skips = not optimizer.last_step_finite and not any_measured(
        model.metrics_variables
    )
    return {} if only_skips else results
