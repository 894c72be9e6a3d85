"""What a model as a whole computes in: its output layers and its scaling needs."""

from collections.abc import Iterator
from typing import Any

import keras
from keras.src.models.functional import Functional

from keras_mp.policies import decision_for, keep_output_in_float32


def computes_in_float16(model: Any) -> bool:
    """Does any layer of the model compute in float16?

    Decided by the layers, never by a policy's name. The shell of a Functional or
    Sequential model computes nothing; a subclassed model may.
    """
    return any(
        layer.compute_dtype == "float16"
        for layer in model._flatten_layers()
        if not (_is_graph(layer) or isinstance(layer, keras.layers.InputLayer))
    )


def keep_outputs_in_float32(model: Any) -> None:
    """Turns the output layers of a Functional or Sequential model to float32.

    Only layers for which a policy of ours has decided: what the user said explicitly
    for a layer wins. Subclassed models are left as they are, their outputs being
    whatever their `call` returns.
    """
    changed = [
        layer for layer in _output_layers(model) if keep_output_in_float32(layer)
    ]
    if changed:
        _refresh_symbolic_dtypes(model)


def _is_graph(layer: Any) -> bool:
    return isinstance(layer, (keras.Sequential, Functional))


def _output_layers(model: Any) -> Iterator[Any]:
    if isinstance(model, keras.Sequential) and model.layers:
        yield from _leaves(model.layers[-1])
    elif isinstance(model, Functional):
        for tensor in model.outputs:
            yield from _producers(tensor)


def _producers(tensor: Any) -> Iterator[Any]:
    """The layers whose values a tensor is made of, seen through plain operations."""
    operation = tensor._keras_history.operation
    if isinstance(operation, keras.layers.Layer):
        yield from _leaves(operation)
        return
    node = operation._inbound_nodes[tensor._keras_history.node_index]
    for argument in node.input_tensors:
        yield from _producers(argument)


def _leaves(layer: Any) -> Iterator[Any]:
    if isinstance(layer, keras.layers.InputLayer):
        return
    if _is_graph(layer):
        yield from _output_layers(layer)
    elif not isinstance(layer, keras.Model):
        yield layer


def _refresh_symbolic_dtypes(model: Any) -> None:
    """Makes the dtypes of a Functional graph's symbolic tensors true again.

    Keras computes them once, when the layers are first called.
    """
    graph = model._functional if isinstance(model, keras.Sequential) else model
    if graph is None:
        return  # A Sequential model that is not built has no graph yet.
    nodes_by_depth = graph._nodes_by_depth
    for depth in sorted(nodes_by_depth, reverse=True):
        for node in nodes_by_depth[depth]:
            if node.is_input:
                continue
            operation = node.operation
            if _is_graph(operation):
                _refresh_symbolic_dtypes(operation)
                inner = [t.dtype for t in operation.outputs]
            elif not isinstance(operation, keras.layers.Layer):
                spec = operation.compute_output_spec(
                    *node.arguments.args, **node.arguments.kwargs
                )
                inner = [t.dtype for t in keras.tree.flatten(spec)]
            elif (decision := decision_for(operation)) and decision.rule:
                inner = [
                    "float32" if keras.backend.is_float_dtype(t.dtype) else t.dtype
                    for t in node.outputs
                ]
            else:
                continue
            for tensor, dtype in zip(node.outputs, inner, strict=True):
                tensor._dtype = dtype
