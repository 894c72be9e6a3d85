"""The output layers of a model, which compute in float32."""

from collections.abc import Iterator
from typing import Any

import keras

from keras_mp.keras_seams import private
from keras_mp.policies.choosing import keep_output_in_float32
from keras_mp.policies.layers import is_graph


def keep_outputs_in_float32(model: Any) -> list[Any]:
    """Turns the output layers of a Functional or Sequential model to float32.

    Only layers for which a policy of ours has decided: what the user said explicitly
    for a layer wins. Subclassed models are left as they are, their outputs being
    whatever their `call` returns.

    Returns:
        The layers that have changed.
    """
    return [layer for layer in _output_layers(model) if keep_output_in_float32(layer)]


def _output_layers(model: Any) -> Iterator[Any]:
    if isinstance(model, keras.Sequential) and model.layers:
        yield from _leaves(model.layers[-1])
    elif isinstance(model, private.Functional):
        for tensor in model.outputs:
            yield from producers(tensor)


def producers(tensor: Any) -> Iterator[Any]:
    """The layers whose values a tensor is made of, seen through plain operations."""
    operation, call = private.origin(tensor)
    if isinstance(operation, keras.layers.Layer):
        yield from _leaves(operation)
        return
    for argument in private.calls_of(operation)[call].input_tensors:
        yield from producers(argument)


def _leaves(layer: Any) -> Iterator[Any]:
    if isinstance(layer, keras.layers.InputLayer):
        return
    if is_graph(layer):
        yield from _output_layers(layer)
    elif not isinstance(layer, keras.Model):
        yield layer
