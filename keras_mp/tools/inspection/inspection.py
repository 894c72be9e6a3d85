"""`inspect`: what every layer of a model computes in, why, and what to look at."""

from typing import Any

import keras

from keras_mp.policies.layers import is_graph
from keras_mp.policies.paths import name_layers
from keras_mp.policies.symbolic import nodes_of
from keras_mp.tools.inspection.findings import findings_of
from keras_mp.tools.inspection.layer_facts import facts_of, layers_of
from keras_mp.tools.inspection.layer_report import Inspection
from keras_mp.tools.inspection.loss_chunks import loss_chunks


def inspect(model: keras.layers.Layer) -> Inspection:
    """Says what every layer of a model computes in, why, and what to look at.

    Neither runs nor changes the model.

    Args:
        model: a `keras.Model`, built or not, compiled or not, or any layer.

    Returns:
        An `Inspection`, which prints as a table.

    Raises:
        TypeError: if `model` is no layer.

    Example:

    ```python
    print(keras_mp.inspect(model))
    ```
    """
    if not isinstance(model, keras.layers.Layer):
        raise TypeError(
            f"`model` must be a keras.Model or a layer. Received: model={model!r}."
        )
    name_layers(model)
    nodes = list(nodes_of(model))
    calls: dict[int, list[Any]] = {}
    for node in nodes:
        calls.setdefault(id(node.operation), []).append(node)
    found = layers_of(model)
    computing = [layer for layer, _ in found if not is_graph(layer)]
    return Inspection(
        model=model.name,
        layers=tuple(
            facts_of(layer, parent, calls.get(id(layer), [])) for layer, parent in found
        ),
        losses=loss_chunks(model, calls),
        warnings=findings_of(model, computing, nodes),
    )
