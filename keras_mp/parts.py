"""What a layer is made of."""

from typing import Any

import keras
from keras.src.models.functional import Functional

layers = keras.layers


def is_graph(layer: Any) -> bool:
    """Is the layer a Sequential or Functional model, which computes nothing itself?"""
    return isinstance(layer, (keras.Sequential, Functional))


def children_of(layer: Any) -> list[Any]:
    """The layers that a layer holds, not those that they hold in turn."""
    children = layer._flatten_layers(include_self=False, recursive=False)
    return [child for child in children if not isinstance(child, layers.InputLayer)]


def parts_of(layer: Any) -> list[Any]:
    """The layers inside which a wrapper computes: the two of one precision."""
    if isinstance(layer, layers.Wrapper):
        parts = [layer.layer]
    elif isinstance(layer, layers.Bidirectional):
        parts = [layer.forward_layer, layer.backward_layer]
    elif isinstance(layer, layers.RNN):
        parts = [layer.cell]
    elif isinstance(layer, layers.StackedRNNCells):
        parts = list(layer.cells)
    else:
        parts = []
    # A cell of the user's own need not be a layer.
    return [part for part in parts if isinstance(part, layers.Layer)]
