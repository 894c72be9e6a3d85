"""Policies that a saved file would not keep.

Keras stores a layer's policy in its config. A custom class may leave it out, and the
layers that its `__init__` makes are made anew when the file is opened: both have the
global policy of the process that opens it. (Sequential and Functional models keep the
policies of their layers, and compute nothing themselves.)
"""

import inspect
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras.src.models.functional import Functional

from keras_mp.diagnostics.inspection.custom_code import is_custom, is_keras, source_of
from keras_mp.policies.layers import children_of, is_graph, layer_path, policy_of

_PLAIN = {*keras.Model.__mro__, *keras.Sequential.__mro__, *Functional.__mro__}
_SET_BEFORE = "Set the same policy before the file is opened, or convert it after."


def lost_policies(
    model: Any, computing: Sequence[Any]
) -> Iterator[tuple[str, str, str]]:
    """Yields path, sentence and remedy for each layer that loses a policy."""
    for layer in dict.fromkeys([model, *computing]):
        if is_keras(type(layer)) or is_custom(layer, "from_config"):
            continue
        config = _config_of(layer)
        if config is not None:
            told = _own(layer, config)
            if told:
                yield layer_path(layer), *told
            elif _loses_children(layer, config):
                yield (
                    layer_path(layer),
                    "a saved file does not keep the policies of the layers that "
                    f"`{type(layer).__name__}` makes: they will be what is global "
                    "where it is opened.",
                    _SET_BEFORE,
                )


def _config_of(layer: Any) -> dict[str, Any] | None:
    if isinstance(layer._dtype_policy, keras.dtype_policies.DTypePolicyMap):
        return None  # Keras changes a map that it writes.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = layer.get_config()
    except Exception:  # Custom code; that it cannot be saved is told by `save`.
        return None
    return config if isinstance(config, dict) else None


def _own(layer: Any, config: dict[str, Any]) -> tuple[str, str] | None:
    if is_graph(layer) or policy_of(layer).name == "float32":
        return None
    name = type(layer).__name__
    if "dtype" not in config:
        return (
            f"a saved file does not keep its policy, as `{name}.get_config` has no "
            "dtype.",
            "Let get_config begin with super().get_config(), and __init__ pass "
            "**kwargs on.",
        )
    parameters = inspect.signature(type(layer).__init__).parameters
    if "dtype" not in parameters and not any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    ):
        return (
            f"a saved file cannot be opened, as `{name}.__init__` takes no dtype, in "
            "which a file keeps the policy.",
            "Let __init__ take **kwargs and pass them to super().__init__.",
        )
    return None


def _loses_children(layer: Any, config: dict[str, Any]) -> bool:
    if not all(owner in _PLAIN for owner in type(layer).__mro__ if is_keras(owner)):
        return False  # What a layer of Keras makes has that layer's policy.
    makers = [m for m in ("__init__", "build") if is_custom(layer, m)]
    source = "".join(source_of(layer, method) for method in makers)
    if not source or "dtype" in source:
        return False  # It sees to it itself, as far as can be told.
    stored = {leaf for leaf in keras.tree.flatten(config) if isinstance(leaf, str)}
    return any(
        policy_of(child).name != "float32" and child.name not in stored
        for child in children_of(layer)
    )
