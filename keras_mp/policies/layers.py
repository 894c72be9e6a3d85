"""What can be asked of any layer: its parts, path, activation, input and policy."""

import functools
import inspect
from collections.abc import Collection
from typing import Any

import keras
from keras import ops

import keras_mp.keras_private as private
from keras_mp.backends import engine
from keras_mp.backends.leaves import leaves
from keras_mp.policies.record import record_of, records
from keras_mp.types import Layer, Variable

layers = keras.layers


def is_graph(layer: Layer) -> bool:
    """Is the layer a Sequential or Functional model, which computes nothing itself?"""
    return isinstance(layer, (keras.Sequential, private.Functional))


def users_code(layer: Layer) -> str:
    """What of the user's a layer runs: its "`call`", a "function"; empty if nothing.

    Keras' own layers run the functions and the cells that they are given.
    """
    if not _is_of_keras(type(layer)):
        return "`call`"
    if isinstance(layer, layers.Lambda):
        return "function"
    for name in ("activation", "recurrent_activation"):
        given = getattr(layer, name, None)
        while isinstance(given, functools.partial):
            given = given.func
        if given is not None and not _is_of_keras(given):
            return f"`{name}`"
    if any(map(users_code, parts_of(layer))):
        return "`cell`" if isinstance(layer, layers.RNN) else "layer"
    return ""


def _is_of_keras(x: Any) -> bool:
    return (getattr(x, "__module__", None) or "").split(".")[0] == "keras"


def children_of(layer: Layer) -> list[Any]:
    """The layers that a layer holds, not those that they hold in turn."""
    children = private.layers_in(layer, itself=False, nested=False)
    return [child for child in children if not isinstance(child, layers.InputLayer)]


def parts_of(layer: Layer) -> list[Any]:
    """The layers whose precision a wrapper shares, because it computes inside them."""
    if not isinstance(layer, _SHARING):
        return []
    if isinstance(layer, layers.Wrapper):
        parts = [layer.layer]
    elif isinstance(layer, layers.Bidirectional):
        parts = [layer.forward_layer, layer.backward_layer]
    elif isinstance(layer, layers.RNN):
        parts = [layer.cell]
    else:
        parts = list(layer.cells)
    # A cell of the user's own need not be a layer.
    return [part for part in parts if isinstance(part, layers.Layer)]


_SHARING = (
    layers.Wrapper,
    layers.Bidirectional,
    layers.RNN,
    layers.StackedRNNCells,
)


def is_composite(layer: Layer) -> bool:
    """Is it made of layers, and more than a wrapper or a layer with a layer activation?

    Its own `call` decides what it computes.
    """
    own = [*parts_of(layer), getattr(layer, "activation", None)]
    return any(child not in own for child in children_of(layer))


def keras_path(layer: Layer) -> str:
    """The path by which a map of policies knows a layer: Keras' own `path`.

    If Keras gives it none, where it was first called: Keras sets the path only after
    the first call, and never for a layer that is built when it is created (Dropout,
    Activation).
    """
    if layer.path:
        return layer.path
    record = records.get(id(layer))
    if record and record.keras_path:
        return record.keras_path
    scope = private.current_path()
    return f"{scope}/{layer.name}" if scope else layer.name


def has_activation(layer: Layer, names: Collection[str]) -> bool:
    """Has a layer an activation function of one of these names?

    A model or a layer made of layers has none of its own: its attribute `activation`
    belongs to one of its layers, as in the tasks of KerasHub.
    """
    activation = getattr(layer, "activation", None)
    while isinstance(activation, functools.partial):
        activation = activation.func
    if isinstance(activation, layers.Softmax):
        found = "softmax" in names
    elif isinstance(activation, layers.Layer):
        found = has_activation(activation, names)
    else:
        # By name, so that jax.nn.softmax and tf.nn.softmax (softmax_v2) are found.
        name = getattr(activation, "__name__", "")
        found = name.removesuffix("_v2") in names
    return found and not (isinstance(layer, keras.Model) or is_composite(layer))


def takes_training(layer: Layer) -> bool:
    """Does a layer's `call` have the argument `training`?"""
    return "training" in inspect.signature(layer.call).parameters


def note_call(layer: Layer, args: tuple, kwargs: dict[str, Any]) -> None:
    """Remembers where and with what a layer was first called, for those who ask."""
    record = record_of(layer)
    record.keras_path = keras_path(layer)
    record.runs_users_code = bool(users_code(layer))
    record.untried = True
    first = _symbolic(args[0]) if args else None
    if isinstance(first, keras.KerasTensor):
        record.first_input = first
    if record.runs_users_code and not is_graph(layer):
        record.called_with = keras.tree.map_structure(_symbolic, (args, kwargs))


def ran_on_values(result: Any) -> bool:
    """Was a call that has returned this on values, not on symbols or in a trace?"""
    symbolic = isinstance(next(leaves(result), None), keras.KerasTensor)
    return not (symbolic or engine.only_shapes() or engine.is_tracing())


def called_with(layer: Layer) -> tuple[tuple, dict[str, Any]] | None:
    """What a layer that runs code of the user's was first called with.

    Arrays and tensors are symbolic tensors in it.
    """
    record = records.get(id(layer))
    return record.called_with if record else None


def _symbolic(argument: Any) -> Any:
    try:
        dtype = keras.backend.standardize_dtype(argument.dtype)
        return keras.KerasTensor(tuple(argument.shape), dtype)
    except (AttributeError, TypeError, ValueError):
        return argument  # No array, or a tensor of unknown rank.


def state_of(layer: Layer) -> list[Any]:
    """What a call may change: no weights, frozen or not. For seeds any draw is good."""
    return [v for part in private.layers_in(layer) for v in private.own_state(part)]


def values_of(variables: list[Variable]) -> list[tuple[Variable, Any]]:
    """Copies of what variables hold, in their own dtypes, within a layer's call too."""
    with private.AutocastScope(None):
        return [(v, ops.copy(v.value)) for v in variables]


def input_shape(layer: Layer) -> tuple[int | None, ...]:
    """The shape of a layer's first input; empty while it is not known."""
    first = first_input(layer)
    return () if first is None else first.shape


def first_input(layer: Layer) -> keras.KerasTensor | None:
    """What a layer was first called with, its first input, as a symbolic tensor."""
    record = records.get(id(layer))
    return record.first_input if record else None


def policy_of(layer: Layer) -> Any:
    """The policy that a layer computes under; in a map, the entry for its path."""
    policy: Any = getattr(layer, "dtype_policy", None)
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        return policy[keras_path(layer)]
    return policy


def has_map(layer: Layer) -> bool:
    policy = getattr(layer, "dtype_policy", None)
    return isinstance(policy, keras.dtype_policies.DTypePolicyMap)


def is_default(policy: Any, copied: bool) -> bool:
    """Has a layer inside another the global policy because nobody chose one for it?

    `copied`: its policy is a copy, equal to the global one and not the same object.
    """
    default = keras.config.dtype_policy()
    return bool(policy == default) if copied else policy is default


def copies_children(layer: Layer) -> bool:
    """Does a layer copy the layers that it is given, from their configs?"""
    return isinstance(layer, keras.layers.Bidirectional)
