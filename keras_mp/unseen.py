"""Models that exist already when half precision is asked for: what nobody has seen.

What the seams note at `compile` and at a first call is made up for here, before a
`ChoosingPolicy` changes the model.
"""

import contextlib
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp import compiling, wanted
from keras_mp.policies import symbolic
from keras_mp.policies.layers import is_graph
from keras_mp.policies.paths import name_layers
from keras_mp.policies.record import record_of, records
from keras_mp.policies.returned import Watched
from keras_mp.types import Layer, Model


def make_up(model: Model) -> None:
    """Looks at a model, or a layer, as the seams would have, if they are in."""
    if wanted.done:
        layers = private.layers_in(model)
        for layer in layers:
            if isinstance(layer, keras.Model):
                compiling.make_up(layer)
        if not all(map(_is_seen, layers)):
            with contextlib.suppress(symbolic.SymbolicCallError):
                symbolic.refresh(model)
        for layer in layers:
            if isinstance(layer, keras.Model) and not _is_seen(layer):
                _call(layer)
    name_layers(model)


def _is_seen(layer: Layer) -> bool:
    if not layer.built or is_graph(layer) or isinstance(layer, keras.layers.InputLayer):
        return True  # Of a graph only its layers matter.
    record = records.get(id(layer))
    return record is not None and record.chosen is not None


def _call(model: Model) -> None:
    """Calls a model without a graph on symbolic tensors, as it was called before.

    Keras remembers their shapes. Their dtypes have to be guessed, and the model stays
    unseen if that fails.
    """
    given = model.get_build_config() or {}
    for dtype in ("float32", "int32"):
        args = [_tensors(given[x], dtype) for x in ("input_shape",) if x in given]
        kwargs = {
            name.rsplit("_", 1)[0]: _tensors(shape, dtype)
            for name, shape in given.get("shapes_dict", {}).items()
        }
        try:
            symbolic.call(Watched(name="watched", layer=model), tuple(args), kwargs)
        except symbolic.SymbolicCallError:
            record_of(model).called_with = None
        else:
            return


def _tensors(shapes: Any, dtype: str) -> Any:
    if isinstance(shapes, dict):
        return {name: _tensors(shape, dtype) for name, shape in shapes.items()}
    if any(isinstance(x, (dict, list, tuple)) for x in shapes):
        return [_tensors(shape, dtype) for shape in shapes]
    return keras.KerasTensor(shapes, dtype)
