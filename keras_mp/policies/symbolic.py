"""The dtypes of a Functional graph's symbolic tensors.

Keras computes them once, when the layers are first called. `model.output.dtype` is
one of them, and a graph casts its inputs to them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from keras import KerasTensor

import keras_mp.keras_private as private
from keras_mp.backends.interface import HALF
from keras_mp.policies.layers import called_with, children_of, is_graph
from keras_mp.types import Layer, Model, Tensor


def refresh(model: Model, changed: list[Any] | None = None) -> None:
    """Corrects the dtypes of all symbolic tensors of a model.

    The layers that changed, and those whose inputs have another dtype now, are called
    once more, on symbolic tensors.

    Args:
        changed: the layers that compute in another precision than before; None for all.

    Raises:
        SymbolicCallError: if such a call fails.
    """
    stale = None if changed is None else {id(layer) for layer in changed}
    done: set[int] = set()
    for layer in private.layers_in(model):
        if is_graph(layer):
            _refresh(layer, stale, done)


def call_again(model: Model) -> None:
    """Calls a model that has no graph as it was first called, on symbolic tensors.

    Raises:
        SymbolicCallError: where that fails.
    """
    arguments = called_with(model)
    if arguments is not None:
        call(model, *arguments)


def call(operation: Any, args: tuple, kwargs: dict[str, Any]) -> list[KerasTensor]:
    """Calls an operation with these arguments, which leaves no trace in a graph.

    Raises:
        SymbolicCallError: where that fails.
    """
    nodes = len(private.calls_of(operation))
    try:
        with whole_tracebacks():  # They name the layer that failed.
            return keras.tree.flatten(operation(*args, **kwargs))
    except Exception as error:
        raise SymbolicCallError(operation, error) from error
    finally:
        del private.calls_of(operation)[nodes:]


def call_like(node: Any, operation: Any) -> None:
    """Calls an operation with the arguments of a call in a graph.

    Raises:
        SymbolicCallError: where that fails.
    """
    copies = {id(tensor): _copy(tensor) for tensor in node.input_tensors}
    args, kwargs = node.arguments.fill_in(copies)
    call(operation, args, kwargs)


def note_float32(layer: Layer) -> None:
    """Corrects the dtypes of what a layer returned in graphs: it is in float32 now."""
    for node in private.calls_of(layer):
        for tensor in filter(is_half, node.outputs):
            private.set_symbolic_dtype(tensor, "float32")


def forget_traces(model: Model) -> None:
    """Drops the traces of a model, because they keep the dtypes that they had."""
    for name in ("train_function", "test_function", "predict_function"):
        if getattr(model, name, None) is not None:
            getattr(model, f"make_{name}")(force=True)


def nodes_of(layer: Layer) -> Iterator[Any]:
    """The calls that make up the graphs in a layer, from inputs to outputs.

    Those of a nested graph come once for each call of it. Layers inside other layers
    are not called in a graph.
    """
    if not is_graph(layer):
        for child in children_of(layer):
            if is_graph(child):
                yield from nodes_of(child)
        return
    graph = graph_of(layer)
    nodes = private.nodes_by_depth(graph) if graph is not None else {}
    for depth in sorted(nodes, reverse=True):
        for node in nodes[depth]:
            if not node.is_input:
                yield node
                if is_graph(node.operation):
                    yield from nodes_of(node.operation)


def graph_of(model: Model) -> Any:
    """The graph of a model; None for a Sequential one that is not built."""
    return private.graph_of(model) if isinstance(model, keras.Sequential) else model


class SymbolicCallError(Exception):
    """A layer cannot be called.

    Attributes:
        layer: the innermost layer in whose call it happened.
    """

    def __init__(self, operation: Any, error: Exception) -> None:
        # Keras surrounds the words of an error with its own and prints them in bold.
        words = str(error).rsplit("\x1b[1m", 1)[-1].split("\x1b[0m", 1)[0]
        super().__init__(f"{type(error).__name__}: {words}")
        self.layer = operation
        trace = error.__traceback__
        while trace is not None:
            caller = trace.tb_frame.f_locals.get("self")
            if isinstance(caller, keras.layers.Layer):
                self.layer = caller
            trace = trace.tb_next


def _refresh(model: Model, stale: set[int] | None, done: set[int]) -> None:
    graph = graph_of(model)
    if graph is None or id(graph) in done:
        return
    done.add(id(graph))
    # Copies, so that the graph does not see these calls.
    copies = {id(tensor): _copy(tensor) for tensor in graph.inputs}
    moved: set[int] = set()
    nodes = private.nodes_by_depth(graph)
    for depth in sorted(nodes, reverse=True):
        for node in nodes[depth]:
            if node.is_input or any(id(t) not in copies for t in node.input_tensors):
                continue
            operation = node.operation
            if is_graph(operation):
                _refresh(operation, stale, done)  # Its outputs' dtypes are read there.
            elif not (
                stale is None
                or stale.intersection(map(id, _parts(operation)))
                or any(id(tensor) in moved for tensor in node.input_tensors)
            ):
                copies.update((id(tensor), _copy(tensor)) for tensor in node.outputs)
                continue
            outputs = call(operation, *node.arguments.fill_in(copies))
            for tensor, copy in zip(node.outputs, outputs, strict=True):
                if tensor.dtype != copy.dtype:
                    moved.add(id(tensor))
                    private.set_symbolic_dtype(tensor, copy.dtype)
                # A copy, or the layer that made the tensor would remember its readers.
                copies[id(tensor)] = _copy(copy)


def _parts(operation: Any) -> list[Any]:
    if isinstance(operation, keras.layers.Layer):
        return private.layers_in(operation)
    return [operation]


def is_half(x: Any) -> bool:
    """Is it a symbolic tensor in float16 or bfloat16?"""
    return isinstance(x, KerasTensor) and x.dtype in HALF


def copy_in_float32(tensor: KerasTensor) -> KerasTensor:
    """A symbolic tensor without a past, like another but for its dtype."""
    return _copy(tensor, "float32")


def _copy(tensor: Tensor, dtype: str | None = None) -> KerasTensor:
    dtype = dtype or tensor.dtype
    copy = KerasTensor(tensor.shape, dtype, tensor.sparse, tensor.ragged)
    mask = private.get_keras_mask(tensor)
    if mask is not None:
        private.set_keras_mask(copy, mask)
    return copy


@contextlib.contextmanager
def whole_tracebacks() -> Iterator[None]:
    """Keeps all frames in the tracebacks of errors meanwhile."""
    before = keras.config.is_traceback_filtering_enabled()
    try:
        keras.config.disable_traceback_filtering()
        yield
    finally:
        if before:
            keras.config.enable_traceback_filtering()
