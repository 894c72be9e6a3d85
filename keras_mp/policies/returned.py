"""Which layers make what a layer without a graph returns: a call shows it.

For a model this is its first call, for a layer in a graph an extra symbolic call.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import keras

from keras_mp.policies import symbolic
from keras_mp.policies.layers import is_graph
from keras_mp.policies.record import record_of, records
from keras_mp.types import Layer, Model

# By thread: the tensors that layers have returned within such a call, and the layers.
# The references are weak, because a call makes many tensors.
watched: dict[int, list[tuple[Any, Any]]] = {}


@contextlib.contextmanager
def watching(model: Model) -> Iterator[None]:
    """Watches the first call of a model, the outermost: `note` what each call returns.

    A graph shows which layers make what it returns.
    """
    thread = threading.get_ident()
    if is_graph(model):
        yield
        return
    try:
        watched[thread] = []
        yield
    finally:
        watched.pop(thread, None)


def note(layer: Layer, result: Any, first_of_all: bool) -> None:
    """Notes what a layer, or a model in its outermost first call, has returned."""
    made = watched.get(threading.get_ident())
    if made is None:
        return
    if first_of_all:
        _note_outputs(layer, made, result)
    elif not isinstance(layer, keras.Model):
        maker = weakref.ref(layer)
        for tensor in keras.tree.flatten(result):
            if hasattr(tensor, "dtype"):
                made.append((weakref.ref(tensor), maker))


def _note_outputs(model: Model, made: list[tuple[Any, Any]], outputs: Any) -> None:
    # If a layer passes a tensor on, the layer that made it has returned earlier.
    found = keras.tree.map_structure(
        lambda output: next((maker for x, maker in made if x() is output), None),
        outputs,
    )
    # A symbolic call shows none of them: what an earlier call has shown still holds.
    if any(keras.tree.flatten(found)) or makers_of(model) is None:
        record = record_of(model)
        record.returned, record.makers = found, None


def makers_of(model: Model) -> Any:
    """The layer that makes each output, or None; only None if they are not known."""
    record = records.get(id(model))
    returned = record.returned if record else None
    return keras.tree.map_structure(lambda layer: layer and layer(), returned)


def makers_in(layer: Layer, node: Any) -> Any:
    """The same for a layer that a graph calls, found by calling it as `node` does."""
    if makers_of(layer) is None:
        with contextlib.suppress(symbolic.SymbolicCallError):
            symbolic.call_like(node, Watched(name="watched", layer=layer))
    return makers_of(layer)


class Watched(keras.Operation):
    """A call of a layer that notes what it returns."""

    def __init__(self, name: str, layer: Layer) -> None:
        super().__init__(name=name)
        self.layer = layer

    def call(self, *args: Any, **kwargs: Any) -> Any:
        with watching(self.layer):
            result = self.layer(*args, **kwargs)
            note(self.layer, result, first_of_all=True)
        return result
