"""What a file holds: stock Keras policies, so that Keras opens it without keras_mp.

A Functional model stores each layer with its policy. A subclass with a `get_config` of
its own, such as every KerasHub model, stores one policy and creates its layers from
it. For such a model we store a map from layer paths to policies.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp import wanted
from keras_mp.policies.choosing import FLOAT32_IN_FILES, decision_for
from keras_mp.policies.layers import children_of, has_map, keras_path, policy_of
from keras_mp.policies.policy import ChoosingPolicy, Decision, chooser_of
from keras_mp.policies.record import record_of
from keras_mp.types import Layer, Model


def policy_in_files(layer: Layer) -> keras.DTypePolicy | None:
    """The stock policy to store for a layer; None if Keras stores the right one.

    A layer that was never called still has a `ChoosingPolicy`, and so may a map.
    """
    policy: Any = getattr(layer, "dtype_policy", None)
    if isinstance(policy, ChoosingPolicy):
        return policy.for_layer(layer)
    if has_map(layer):
        if layer.path and not children_of(layer):
            # Keras opens a layer outside of its model, where it has another path.
            return _stock(policy_of(layer))
        entries = {path: _stock(policy[path]) for path in policy}
        default = _stock(private.default_in_map(policy))
        return keras.dtype_policies.DTypePolicyMap(default, entries)
    return None


def _stock(policy: Any) -> Any:
    ours = isinstance(policy, ChoosingPolicy)
    return keras.DTypePolicy(policy.name) if ours else policy


def own_get_config(model_class: type) -> type | None:
    """The class outside of Keras that defines a Functional class' `get_config`."""
    if not issubclass(model_class, private.Functional):
        return None
    definer = next(c for c in model_class.__mro__ if "get_config" in vars(c))
    return None if private.is_keras_own(definer) else definer


def storing_a_map(get_config: Callable) -> Callable:
    """Wraps such a `get_config`: during the call the model's policy is a stock map."""

    @functools.wraps(get_config)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _stock_policies(self):
            return get_config(self, *args, **kwargs)

    return wrapper


@contextlib.contextmanager
def _stock_policies(model: Model) -> Iterator[None]:
    chooser = chooser_of(policy_of(model))
    if chooser is None:
        yield
        return
    policy = _stock_policy(model, keras.DTypePolicy(str(chooser.name)))
    # A task of KerasHub holds a backbone, and stores the policy of both.
    models = [m for m in private.layers_in(model) if isinstance(m, private.Functional)]
    before = [(m, m.dtype_policy) for m in models if chooser_of(policy_of(m))]
    try:
        for each, _ in before:
            private.set_policy(each, policy)
        yield
    finally:
        for each, own in before:
            private.set_policy(each, own)


def _stock_policy(model: Model, default: keras.DTypePolicy) -> keras.DTypePolicy:
    entries: dict[str, keras.DTypePolicy] = {}
    within: set[int] = set()
    for layer in private.layers_in(model):  # Parents come before their children.
        decision = decision_for(layer)
        in_float32 = decision is not None and decision.rule is not None
        policy = policy_of(layer)
        if id(layer) in within:
            continue
        parts = private.layers_in(layer)
        if in_float32 and not all(part.path for part in parts):
            # A map cannot name a layer without a path, such as a Dropout. So keras_mp
            # keeps this layer with all its parts in float32 when it opens the file.
            entries[FLOAT32_IN_FILES + keras_path(layer)] = policy
            within.update(map(id, parts))
        elif layer.path and (in_float32 or policy.quantization_mode is not None):
            entries[layer.path] = policy
    return keras.dtype_policies.DTypePolicyMap(default, entries) if entries else default


def with_decisions(layer: Layer, pickled: tuple) -> tuple:
    """Adds the decisions about a layer's parts to what Keras pickles or copies.

    Keras goes by a file, which does not say whether we or the user chose a policy.
    """
    decisions = {
        number: (
            decision.rule and dataclasses.replace(decision.rule, applies=()),
            decision.head,
        )
        for number, each in enumerate(private.layers_in(layer))
        if (decision := decision_for(each)) is not None
    }
    return (_unpickled, (*pickled, decisions)) if decisions else pickled


def _unpickled(function: Callable, arguments: tuple, decisions: dict[int, Any]) -> Any:
    wanted.half_precision()
    layer = function(*arguments)
    within = private.layers_in(layer)
    for number, (rule, head) in decisions.items():
        decision = Decision(policy_of(within[number]), rule, head=head)
        record_of(within[number]).decision = decision
    return layer


def wrap_get_config(original: Callable) -> Callable:
    """Wraps the config of a layer."""

    def get_config(self: Any) -> Any:
        config = original(self)
        stock = policy_in_files(self)
        if stock is not None:
            config["dtype"] = keras.dtype_policies.serialize(stock)
        return config

    return get_config


def wrap_reduce(original: Callable) -> Callable:
    """Wraps what is pickled and copied."""

    # Keras' optimizers and metrics inherit it from the same class.
    def __reduce__(self: Any) -> Any:
        pickled = original(self)
        is_layer = isinstance(self, keras.layers.Layer)
        return with_decisions(self, pickled) if is_layer else pickled

    return __reduce__


# The models' classes seen so far with a `get_config` of their own -> that `get_config`.
_own_get_configs: dict[Any, Callable] = {}


def wrap_own_get_configs() -> None:
    """Wraps the `get_config` of classes that exist: models may have been created."""
    for model_class in _subclasses(private.Functional):
        wrap_own_get_config(model_class)


def unwrap_own_get_configs() -> None:
    """Gives each class its own `get_config` back."""
    while _own_get_configs:
        owner, get_config = _own_get_configs.popitem()
        owner.get_config = get_config


def _subclasses(kind: type) -> Iterator[type]:
    each: type
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def wrap_own_get_config(layer_class: type) -> None:
    """Wraps the `get_config` of a class of models, if it is not Keras'."""
    owner = own_get_config(layer_class)
    if owner is not None and owner not in _own_get_configs:
        _own_get_configs[owner] = vars(owner)["get_config"]
        wrapper = storing_a_map(_own_get_configs[owner])
        setattr(owner, "get_config", wrapper)  # noqa: B010 (for the type check)
