"""One batch through a model, forward and backward, which leaves the model as it was."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import ops

import keras_mp.keras_private as private
from keras_mp.backends.differentiation import Gradients, See, differentiate
from keras_mp.diagnostics.calls import calls_made_by
from keras_mp.policies.layers import takes_training

_TRAINING = {"training": True}


def gradients_of(
    model: Any,
    batch: tuple[Any, Any, Any],
    scale: float,
    watch: Callable[[See], contextlib.AbstractContextManager[None]] | None = None,
    compiled: bool = False,
) -> Gradients:
    """Differentiates the loss of a compiled and built model on one batch.

    Args:
        batch: inputs, targets and sample weights.
        scale: what the loss is multiplied by before it is differentiated.
        watch: a context in which the loss is computed, given `see` of `differentiate`.
            Without it, `see` gets the outputs of the model.
        compiled: whether to compile; only on JAX.
    """

    def loss_of(batch: Any, see: See) -> Any:
        x, y, weights = batch
        with watch(see) if watch else contextlib.nullcontext():
            outputs = model(x, **_TRAINING if takes_training(model) else {})
            if watch is None:
                outputs = keras.tree.map_structure(lambda t: see(t)[0], outputs)
            # A `compute_loss` of the user's need not take `training`.
            parameters = inspect.signature(model.compute_loss).parameters
            training = _TRAINING if "training" in parameters else {}
            loss = model.compute_loss(x, y, outputs, weights, **training)
        return ops.cast(loss, "float32") * scale

    variables = [*model.variables, *model.metrics_variables, *_recurrent(model)]
    state = {id(v): v for v in variables}
    try:
        return differentiate(
            loss_of,
            keras.tree.map_structure(
                lambda x: None if x is None else ops.convert_to_tensor(x), batch
            ),
            model.trainable_variables,
            list(state.values()),
            compiled=compiled,
        )
    finally:
        private.clear_losses(model)


def _recurrent(model: Any) -> Iterator[Any]:
    """The states of stateful RNNs, which Keras leaves out of `variables`."""
    for layer in private.layers_in(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            yield from keras.tree.flatten(layer.states)


@contextlib.contextmanager
def results_through(pass_on: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Replaces each x that an operation returns with `pass_on(operation, x)`.

    An operation is a layer or an operation of a graph. The cell of an RNN, which is
    called at each step of a loop, is left alone.
    """
    within_loop = False

    def make(operation: Any, call: Callable, args: tuple, kwargs: dict) -> Any:
        nonlocal within_loop
        if within_loop:
            return call(*args, **kwargs)
        within_loop = isinstance(operation, keras.layers.RNN)
        try:
            result = call(*args, **kwargs)
        finally:
            within_loop = False
        passed = functools.partial(pass_on, operation)
        return keras.tree.map_structure(passed, result)

    with calls_made_by(make):
        yield
