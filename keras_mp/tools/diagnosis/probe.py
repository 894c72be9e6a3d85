"""The ranges of all that one batch computes, forward and backward."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras

from keras_mp.backends.differentiation import See
from keras_mp.loss_scaling.one_batch import gradients_of
from keras_mp.policies.paths import layer_path, variable_path
from keras_mp.tools.calls import results_through
from keras_mp.tools.diagnosis.ranges import Range, range_of
from keras_mp.types import Model


class Output(NamedTuple):
    """The range of what a layer, or an operation of a graph, has returned."""

    path: str
    operation: Any
    values: Range
    gradient: Range | None  # The gradient of the loss by it, if any.


class Probe(NamedTuple):
    """The ranges of one batch."""

    outputs: tuple[Output, ...]  # In the order in which they were computed.
    loss: Range  # Multiplied by the scale.
    gradients: dict[str, Range | None]  # By the paths of the trainable variables.


def probe(model: Model, batch: tuple[Any, Any, Any], scale: float) -> Probe:
    """Runs one batch forward and backward; see `gradients_of`."""
    calls = Calls()
    compiled = model.jit_compile is not False and not model.run_eagerly
    found = gradients_of(model, batch, scale, calls.shown_to, compiled)
    outputs = zip(calls.made, found.seen, found.by_seen, strict=True)
    gradients = zip(model.trainable_variables, found.by_variable, strict=True)
    return Probe(
        outputs=tuple(
            Output(path, operation, range_of(values), _range(gradient))
            for (path, operation), values, gradient in outputs
        ),
        loss=range_of(found.loss),
        gradients={variable_path(v): _range(gradient) for v, gradient in gradients},
    )


def _range(array: Any) -> Range | None:
    return None if array is None else range_of(array)


class Calls:
    """The tensors that layers and operations return, in the order of their calls."""

    @contextlib.contextmanager
    def shown_to(self, see: See) -> Iterator[None]:
        # Reset each time, because the loss may be computed more than once.
        self.made: list[tuple[str, Any]] = []
        self._known: dict[int, Any] = {}
        self._times: dict[str, int] = {}
        self._see = see
        with results_through(self._shown):
            yield
        self._known.clear()

    def _shown(self, operation: Any, x: Any) -> Any:
        # A layer of layers returns what its last layer has returned.
        if id(x) in self._known or not hasattr(x, "dtype"):
            return x
        shown, known = self._see(x)
        if known:
            self._known[id(shown)] = shown
            self.made.append((self._path(operation), operation))
        return shown

    def _path(self, operation: Any) -> str:
        is_layer = isinstance(operation, keras.layers.Layer)
        path = layer_path(operation) if is_layer else operation.name
        times = self._times[path] = self._times.get(path, 0) + 1
        return path if times == 1 else f"{path} (output {times})"
