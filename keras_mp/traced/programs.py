"""The traces of a step, on the tensors that a model's variables hold."""

from collections.abc import Callable
from typing import Any

import keras_mp.keras_private as private
from keras_mp import interrupts
from keras_mp.backends import engine
from keras_mp.backends.train_step import logs_of_step
from keras_mp.loss_scaling import stage, step
from keras_mp.loss_scaling.optimizer import loss_scaling_of
from keras_mp.policies.layers import state_of
from keras_mp.replaced import replaced
from keras_mp.traced.assumed import Assumed, filled, places_in, tensors_in
from keras_mp.types import Gradients, Model, Tensor, Variable, Variables


class ReplayError(Exception):
    """A trace does not run on this batch, which has changed nothing; see its cause."""


class Forward:
    """A `test_step` or a `predict_step`.

    Args:
        model: a model.
        name: of its method.
        batch: what the step gets.
        assumed: of these two.

    Attributes:
        fits: `Assumed.holds`.
    """

    def __init__(self, model: Model, name: str, batch: Any, assumed: Assumed) -> None:
        self.fits = assumed.holds
        self._run = getattr(model, name)
        self._variables, self._batch = assumed.variables, batch
        self._values = [engine.tracing.leaf(x) for x in assumed.tensors]
        self._result: Any = None
        given = [*self._values, *tensors_in(batch)]
        try:
            self._trace = engine.tracing.Trace(self._step, given)
        finally:
            private.clear_losses(model)  # What is traced has no values.
        self._result = places_in(self._result)
        del self._batch

    def _step(self, *tensors: Tensor) -> list[Tensor]:
        batch = filled(self._batch, iter(tensors[len(self._variables) :]))
        with private.holding(self._variables, tensors):
            self._result = self._run(batch)
        return tensors_in(self._result)

    def take(self, batch: Any) -> tuple[bool, Any]:
        """Takes a step.

        Returns:
            True, and what the step returns.

        Raises:
            ReplayError: if it cannot.
        """
        found = _replayed(self._trace, [*self._values, *tensors_in(batch)])
        return True, filled(self._result, iter(found))


class Train:
    """A `train_step`, in two traces.

        until the gradients   the step, with what tells if they are finite
        with them             what the optimizer writes, and the new loss scale

    Args and attributes: as in `Forward`.
    """

    def __init__(self, model: Model, name: str, batch: Any, assumed: Assumed) -> None:
        self.fits = assumed.holds
        self._model, self._batch = model, batch
        self._scaling = loss_scaling_of(model.optimizer)
        self._variables = assumed.variables
        trained = {id(v) for v in model.trainable_variables}
        leaf, trace = engine.tracing.leaf, engine.tracing.Trace
        self._values = [leaf(x) for x in assumed.tensors]
        derived = [
            leaf(x, id(v) in trained)
            for v, x in zip(self._variables, self._values, strict=True)
        ]
        self._written = [*state_of(model), *model.metrics_variables]
        self._found: list[Tensor] = []
        self._given: list[Any] = []
        self._grads: list[Tensor] = []
        self._logs: Any = None
        try:
            given = [*derived, *tensors_in(batch)]
            self._forward = trace(self._until_gradients, given)
            self._update = trace(self._with_gradients, [*self._values, *self._grads])
        finally:
            private.clear_losses(model)  # What is traced has no values.
        first = len(self._found)
        self._places = first, first + len(self._grads)
        self._logs = places_in(self._logs)
        # Else what the trace is made of would stay.
        del self._batch, self._grads, self._found, self._given, self._finish
        written = {id(v): v for v in self._written}.values()
        self._kept = engine.tracing.Kept([leaf(private.raw_value(v)) for v in written])
        model.zero_grad()

    # What is traced --------------------------------------------------------------

    def _until_gradients(self, *tensors: Tensor) -> list[Tensor]:
        batch = filled(self._batch, iter(tensors[len(self._variables) :]))
        with (
            private.holding(self._variables, tensors),
            replaced("gradients", self._model.optimizer, {"apply": self._noting}),
            engine.tracing.noted_by(self._note),
            stage.train_step(),
        ):
            self._logs = self._model.train_step(batch)
        self._grads = [g for g in self._given if g is not None]
        return [*self._found, *self._grads, *tensors_in(self._logs)]

    def _noting(self, apply: Callable) -> Callable:
        """What takes the gradients in place of the optimizer's `apply`."""
        scaling, optimizer = self._scaling, self._model.optimizer

        def note(grads: Gradients, variables: Variables) -> None:
            self._given = [*grads]
            self._finish = lambda grads: apply(grads, variables)

        def prepare(grads: Gradients, variables: Variables) -> None:
            inner = optimizer.inner_optimizer
            with stage.update_by(optimizer, scaled=True):
                prepared = step.prepare(scaling, inner, [*grads], [*variables], None)
            self._given, found = prepared.grads, prepared.found
            if found is None:
                found = engine.tracing.found_in(prepared.checked)
            self._found = [found]

            def write(grads: list[Tensor]) -> None:
                with stage.update_by(optimizer, scaled=True):
                    given = prepared._replace(grads=grads)
                    step.write(scaling, inner, given, step.applied(scaling))

            self._finish = write

        return note if scaling is None else prepare

    def _note(self, variable: Variable) -> None:
        self._written.append(variable)  # It may be a frozen weight.

    def _with_gradients(self, *tensors: Tensor) -> list[Tensor]:
        given = iter(tensors[len(self._variables) :])
        with private.holding(self._variables, tensors):
            self._finish([None if g is None else next(given) for g in self._given])
        return []

    # A step ----------------------------------------------------------------------

    def take(self, batch: Any) -> tuple[bool, Any]:
        """Takes a step unless it would be skipped.

        Returns:
            Whether it was taken, and its logs. If not, nothing has changed.

        Raises:
            ReplayError: if it cannot.
        """
        scaling, applied, kept = self._scaling, False, True
        states = engine.generator_states() if self._forward.draws else {}

        def put_back() -> None:
            nonlocal kept
            if kept and not applied:
                with interrupts.held():
                    self._kept.put_back()
                    engine.set_generator_states(states)
                    kept = False

        if scaling is not None:
            scaling.begin_step()
        self._kept.keep()  # An interrupt may end this half way: nothing has changed.
        try:
            try:
                found = _replayed(self._forward, [*self._values, *tensors_in(batch)])
                first, end = self._places
                # To read whether all is finite is all that a step waits for.
                if not (first and bool(found[0])):
                    with interrupts.held():
                        self._update(*self._values, *found[first:end])
                        applied = True
                        if scaling is not None:
                            scaling.note(True)
            finally:
                put_back()
        finally:  # Again, because an interrupt may have come in between.
            put_back()
        if not applied:
            return False, None
        logs = filled(self._logs, iter(found[end:]))
        return True, logs_of_step(self._model, logs, scaling, False, False)


def _replayed(trace: Any, tensors: list[Tensor]) -> list[Tensor]:
    try:
        found: list[Tensor] = trace(*tensors)
        return found
    except Exception as error:
        raise ReplayError from error
