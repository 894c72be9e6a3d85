"""Outputs that other outputs are computed from: gradients pass from one to the other.

A model hands out a float32 copy of a half-precision output. What is computed from that
output goes on with the copy, cast back, which changes no value: else the copy is a dead
end for Grad-CAM, which asks for the gradient of a class in a feature map.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp.backends import engine
from keras_mp.backends.known import Known
from keras_mp.backends.leaves import is_half_tensor, mapped
from keras_mp.policies import returned
from keras_mp.policies.layers import is_graph
from keras_mp.policies.record import record_of
from keras_mp.types import Layer, Model

# Each thread sets and removes its own entry alone.
# By thread: what makes the results that the outermost call may hand out, layers and
# operations, by the id of the graph that calls them; None: no graph does.
within: dict[int, dict[int | None, set[int]]] = {}

# Tensors that a call goes on with -> the float32 ones that they were cast from.
_wide: Known[Any] = Known()


@contextlib.contextmanager
def passed_on(makers: dict[int | None, set[int]]) -> Iterator[None]:
    """Within a model's outermost call its outputs are cast before they are used."""
    thread = threading.get_ident()
    try:
        within[thread] = makers
        yield
    finally:
        within.pop(thread, None)


def note_makers(model: Model) -> None:
    """Remembers what makes the outputs that a model may hand out; see `within`.

    A model without a graph shows it in its first call.
    """
    record = record_of(model)
    if record.makers is None:
        found: dict[int | None, set[int]] = {}
        if not engine.differentiates_in_outputs or isinstance(model, keras.Sequential):
            pass
        elif is_graph(model):
            found = _in_graph(model)
        elif record.returned is None:
            return
        else:
            makers = keras.tree.flatten(returned.makers_of(model))
            if len(makers) > 1:
                found = {None: {id(maker) for maker in makers if maker}}
        record.makers = found


def _in_graph(graph: Any) -> dict[int | None, set[int]]:
    """What makes the outputs of a graph that it reads itself."""
    nodes = [node for nodes in private.nodes_by_depth(graph).values() for node in nodes]
    read = {id(tensor) for node in nodes for tensor in node.input_tensors}
    found: dict[int | None, set[int]] = {}
    for tensor in graph.outputs:
        operation, _ = private.origin(tensor)
        if id(tensor) in read:
            found.setdefault(id(graph), set()).add(id(operation))
        if isinstance(operation, private.Functional):  # Its outputs are ours.
            found |= _in_graph(operation)
    return found


def makes_output(layer: Layer) -> bool:
    """May the outermost call hand out what this layer returns, outside of graphs?"""
    thread = threading.get_ident()
    if isinstance(layer, keras.Model) or not engine.differentiates_in_outputs:
        return False
    if thread in returned.watched:
        # Nobody knows yet. An eager call is the first only once; a trace is made again.
        return not engine.is_tracing()
    return id(layer) in within.get(thread, {}).get(None, ())


def through_float32(structure: Any) -> Any:
    """The same values, each half-precision tensor cast to float32 and back."""
    return mapped(_through_float32, structure)


def _through_float32(x: Any) -> Any:
    # A layer may pass on what a layer in it has made.
    if not is_half_tensor(x) or _wide.get(x) is not None:
        return x
    wide = private.cast_output(x)
    half = private.cast_output(wide, x.dtype)
    _wide.note(half, wide)
    return half


def in_float32(x: Any) -> Any:
    """A half-precision output in float32: what it was cast from, if anything."""
    wide = _wide.get(x)
    return private.cast_output(x) if wide is None else wide


def wrap_run(original: Callable) -> Callable:
    """Wraps the run of a graph, within the outermost call of a model."""

    def _run_through_graph(
        self: Any,
        inputs: Any,
        operation_fn: Callable = lambda operation: operation,
        **kwargs: Any,
    ) -> Any:
        makers = within.get(threading.get_ident()) if within else None
        makes = makers and makers.get(id(self))
        if not makes:
            return original(self, inputs, operation_fn, **kwargs)

        def passing_on(operation: Any) -> Callable:
            call = operation_fn(operation)
            if id(operation) not in makes:
                return call
            return lambda *args, **kwargs: through_float32(call(*args, **kwargs))

        return original(self, inputs, passing_on, **kwargs)

    return _run_through_graph
