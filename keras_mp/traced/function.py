"""When a step is traced: once two batches in a row are alike, if nothing forbids it."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp.backends import engine
from keras_mp.backends.train_step import UNDERFLOW, monitored
from keras_mp.loss_scaling.optimizer import loss_scaling_of
from keras_mp.messages import warn
from keras_mp.policies.symbolic import whole_tracebacks
from keras_mp.traced.assumed import Assumed
from keras_mp.traced.programs import Forward, ReplayError, Train
from keras_mp.types import Model

# A model whose variables, or numbers of its optimizer, change all the time is eager.
MOST_TRACES = 8


def is_asked_for(model: Model, name: str) -> bool:
    """Is this step of a model to be traced? It is if it is Keras' own."""
    if model.run_eagerly or not model.jit_compile or engine.tracing is None:
        return False
    step, own = (inspect.getattr_static(x, name) for x in (model, keras.Model))
    return step is own


@contextlib.contextmanager
def not_compiled(model: Model) -> Iterator[None]:
    """Lets Keras make functions that torch does not compile."""
    try:
        model.jit_compile = False
        yield
    finally:
        model.jit_compile = True


class TracedFunction:
    """A train, test or predict function of a model, which is compiled.

    Args:
        model: the model.
        name: the step that the function takes, Keras' own: "train_step".
        eager: the function: a list of one batch -> what the step returns.
    """

    def __init__(self, model: Model, name: str, eager: Callable) -> None:
        self._model, self._name, self._eager = model, name, eager
        self._program: Forward | Train | None = None
        self._before: Assumed | None = None
        self._traces = 0

    def call(self, data: Any) -> Any:
        """Takes a step."""
        batch, taken, result = data[0], False, None
        if self._may_trace():
            try:
                program = self._program_for(batch)
                if program is not None:
                    taken, result = program.take(batch)
            except ReplayError as error:
                # If the batch is to blame, the eager step says so.
                self._stay_eager(engine.tracing.told(error.__cause__))
        if taken:
            return result
        result = self._eager(data)
        if self._program is not None:  # Traced steps make no use of these.
            self._model.zero_grad()
        return result

    def _may_trace(self) -> bool:
        if self._traces > MOST_TRACES or self._name != "train_step":
            return self._traces <= MOST_TRACES
        scaling = loss_scaling_of(self._model.optimizer)
        retakes = scaling and scaling.retakes and scaling.retake_steps is not None
        # Who asks for the share of gradients that underflow gets it in each step.
        return not retakes and monitored.get(self._model) != UNDERFLOW

    def _program_for(self, batch: Any) -> Forward | Train | None:
        if self._program is not None and self._program.fits(batch):
            return self._program
        try:
            before, self._before = self._before, Assumed(self._model, batch)
            if before is None or not before.holds(batch):
                return None
            self._traces += 1
            reason = self._why_not()
            if not reason:
                kind = Train if self._name == "train_step" else Forward
                with whole_tracebacks():
                    self._program = kind(self._model, self._name, batch, self._before)
                return self._program
        except Exception as error:
            reason = engine.tracing.told(error)
        self._stay_eager(reason)
        return None

    def _stay_eager(self, reason: str) -> None:
        self._traces, self._program = MOST_TRACES + 1, None
        warn(
            f"The {self._name} of {self._model.name!r} stays eager in spite of "
            f"`jit_compile=True`: {reason}."
        )

    def _why_not(self) -> str:
        """Why the step is not to be traced, as a clause; or empty."""
        model, modules = self._model, keras.layers.TorchModuleWrapper
        if self._traces > MOST_TRACES:
            return "its variables, or its optimizer's numbers, change all the time"
        if workers := engine.other_workers(model):
            return f"{workers} share its batches"
        if any(isinstance(layer, modules) for layer in private.layers_in(model)):
            return "it holds a module of torch, which may have hooks and buffers"
        if any(engine.tracing.has_hooks(v.value) for v in model.trainable_variables):
            return "a gradient has a hook, which a trace would call once"
        return ""
