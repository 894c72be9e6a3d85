"""The dtypes of a Functional graph's symbolic tensors.

Keras computes them once, when the layers are first called. `model.output.dtype` is
one of them, and what a graph casts its inputs to.
"""

from typing import Any

import keras
from keras import KerasTensor

from keras_mp.parts import is_graph


def refresh(model: Any) -> None:
    """Makes the dtypes of all symbolic tensors of a model true again.

    Every layer of the graphs in it is called once more, on symbolic tensors.

    Raises:
        SymbolicCallError: where such a call fails.
    """
    done: set[int] = set()
    for layer in model._flatten_layers():
        if is_graph(layer):
            _refresh(layer, done)


class SymbolicCallError(Exception):
    """A layer cannot be called.

    Attributes:
        layer: the layer.
    """

    def __init__(self, layer: Any, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.layer = layer


def _refresh(model: Any, done: set[int]) -> None:
    graph = model._functional if isinstance(model, keras.Sequential) else model
    if graph is None or id(graph) in done:
        return  # A Sequential model that is not built has no graph yet.
    done.add(id(graph))
    # Copies, so that the graph does not see these calls.
    copies = {id(tensor): _copy(tensor) for tensor in graph.inputs}
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        for node in graph._nodes_by_depth[depth]:
            if node.is_input or any(id(t) not in copies for t in node.input_tensors):
                continue
            operation = node.operation
            if is_graph(operation):
                _refresh(operation, done)  # First: its outputs' dtypes are read there.
            outputs = _call(operation, *node.arguments.fill_in(copies))
            for tensor, copy in zip(node.outputs, outputs, strict=True):
                tensor._dtype = copy.dtype
                copies[id(tensor)] = copy


def _copy(tensor: Any) -> KerasTensor:
    copy = KerasTensor(tensor.shape, tensor.dtype, sparse=tensor.sparse)
    copy._ragged = tensor.ragged
    return copy


def _call(operation: Any, args: tuple, kwargs: dict[str, Any]) -> list[KerasTensor]:
    nodes = len(operation._inbound_nodes)
    try:
        return keras.tree.flatten(operation(*args, **kwargs))
    except Exception as error:
        raise SymbolicCallError(operation, error) from error
    finally:
        del operation._inbound_nodes[nodes:]
