"""What a model writes that stores one policy for all its layers.

A Functional model stores each layer with its policy. A class built on it that has a
`get_config` of its own, as all of KerasHub's have, stores one policy and creates its
layers with it again. What was decided layer by layer then fits into a map by path.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.models.functional import Functional

from keras_mp.parts import layer_path
from keras_mp.policies import IN_FILES, chooser_of, decision_for, policy_of


def own_get_config(model_class: type) -> type | None:
    """The class that has the `get_config` of a class built on Functional, if any."""
    if not issubclass(model_class, Functional):
        return None
    definer = next(c for c in model_class.__mro__ if "get_config" in vars(c))
    return None if definer.__module__.startswith("keras.src.") else definer


def storing_a_map(get_config: Callable) -> Callable:
    """Wraps such a `get_config`: the model's policy is a stock map meanwhile."""

    @functools.wraps(get_config)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _stock_policies(self):
            return get_config(self, *args, **kwargs)

    return wrapper


@contextlib.contextmanager
def _stock_policies(model: Any) -> Iterator[None]:
    chooser = chooser_of(policy_of(model))
    if chooser is None:
        yield
        return
    policy = _stock_policy(model, keras.DTypePolicy(str(chooser.name)))
    # A task holds a backbone that stores the policy of both.
    models = [m for m in model._flatten_layers() if isinstance(m, Functional)]
    before = [(vars(m), m._dtype_policy) for m in models if chooser_of(policy_of(m))]
    for attributes, _ in before:
        attributes["_dtype_policy"] = policy
    try:
        yield
    finally:
        for attributes, own in before:
            attributes["_dtype_policy"] = own


def _stock_policy(model: Any, default: keras.DTypePolicy) -> keras.DTypePolicy:
    entries: dict[str, keras.DTypePolicy] = {}
    within: set[int] = set()
    for layer in model._flatten_layers():  # Parents come before their children.
        decision = decision_for(layer)
        kept = decision is not None and decision.rule is not None
        policy = policy_of(layer)
        if id(layer) in within:
            continue
        parts = layer._flatten_layers()
        if kept and not all(part.path for part in parts):
            # A map has no word for a layer without a path, such as a Dropout. So this
            # one is kept in float32, with all of them, where keras_mp opens the file.
            entries[IN_FILES + layer_path(layer)] = policy
            within.update(map(id, parts))
        elif layer.path and (kept or policy.quantization_mode is not None):
            entries[layer.path] = policy
    return keras.dtype_policies.DTypePolicyMap(default, entries) if entries else default
