"""What layers and weights are called: by their place in the outermost model.

Keras' own `path` says where a layer was built: "conv" in a Functional model, "net/conv"
in a subclassed one, and after loading perhaps another. Here it is "block/conv" in each
of them: the names of the layers from the outermost model's own down to this one.
"""

import functools
import weakref
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp.policies.layers import keras_path
from keras_mp.policies.record import record_of, records
from keras_mp.types import Layer, Variable

# Paths by the id of their variable; a variable has no hash.
_variables: dict[int, tuple[weakref.ref, str]] = {}


def layer_path(layer: Layer) -> str:
    """The path of a layer; Keras' own while no model that holds it has been called."""
    record = records.get(id(layer))
    return (record and record.path) or keras_path(layer)


def variable_path(variable: Variable) -> str:
    """The path of a variable: its layer's and its own name; a native one's name."""
    found = _variables.get(id(variable))
    return found[1] if found else getattr(variable, "path", variable.name)


def name_layers(whole: Any, within_another: bool = False) -> None:
    """Gives all layers within a model, or a layer, and their weights their paths.

    What is known to lie within another model has the paths that it has there.

    Args:
        whole: a model or any layer.
        within_another: whether it is about to become part of a model, so that its own
            name belongs to the paths.
    """
    record = record_of(whole)
    if record.inside:
        return
    is_outermost = isinstance(whole, keras.Model) and not within_another
    record.path = whole.name
    _name_parts(whole, "" if is_outermost else f"{whole.name}/", {id(whole)})


def _name_parts(layer: Layer, before: str, seen: set[int]) -> None:
    for variable in private.own_variables(layer):
        key, own = id(variable), before + variable.name
        if _variables.get(key, (None, None))[1] != own:
            reference = weakref.ref(variable, functools.partial(_forget, key))
            _variables[key] = reference, own
    for child in private.layers_in(layer, itself=False, nested=False):
        if id(child) not in seen and not isinstance(child, keras.layers.InputLayer):
            seen.add(id(child))
            record = record_of(child)
            record.inside, record.path = True, before + child.name
            _name_parts(child, f"{record.path}/", seen)


def _forget(key: int, reference: Any) -> None:
    _variables.pop(key, None)
