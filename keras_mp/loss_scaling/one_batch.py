"""One batch through a model, forward and backward, which leaves the model as it was."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras import ops

import keras_mp.keras_private as private
from keras_mp.backends.differentiation import Gradients, See, differentiate
from keras_mp.policies.layers import takes_training
from keras_mp.types import Model

_TRAINING = {"training": True}


def gradients_of(
    model: Model,
    batch: tuple[Any, Any, Any],
    scale: float,
    watch: Callable[[See], contextlib.AbstractContextManager[None]] | None = None,
    compiled: bool = False,
    variables: Sequence[Any] | None = None,
) -> Gradients:
    """Differentiates the loss of a compiled and built model on one batch.

    Args:
        batch: inputs, targets and sample weights.
        scale: what the loss is multiplied by before it is differentiated.
        watch: a context in which the loss is computed, given `see` of `differentiate`.
            Without it, `see` gets the outputs of the model.
        compiled: whether to compile; only on JAX.
        variables: what it is differentiated by; None for all trainable ones.
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

    everything = [*model.variables, *model.metrics_variables, *_recurrent(model)]
    state = {id(v): v for v in everything}
    try:
        return differentiate(
            loss_of,
            keras.tree.map_structure(
                lambda x: None if x is None else ops.convert_to_tensor(x), batch
            ),
            model.trainable_variables if variables is None else variables,
            list(state.values()),
            compiled=compiled,
        )
    finally:
        private.clear_losses(model)


def _recurrent(model: Model) -> Iterator[Any]:
    """The states of stateful RNNs, which Keras leaves out of `variables`."""
    for layer in private.layers_in(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            yield from keras.tree.flatten(layer.states)
