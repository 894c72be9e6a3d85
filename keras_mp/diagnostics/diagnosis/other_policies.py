"""The layers of a model under other policies for a while."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_mp.policies.layers import is_graph, layer_path, policy_of
from keras_mp.policies.outputs import producers
from keras_mp.policies.policy import HALF, MixedFloat16
from keras_mp.policies.symbolic import graph_of

FLOAT32 = keras.DTypePolicy("float32")
_MEMORY = ("_dtype_policy", "_keras_mp_decision", "_keras_mp_chosen")


@contextlib.contextmanager
def policies_meanwhile(
    model: Any, choose: Callable[[Any], keras.DTypePolicy | None]
) -> Iterator[None]:
    """Lets the layers of a model compute under other policies for a while.

    Args:
        model: the model.
        choose: layer -> its policy, or None for the one that it has.
    """
    layers = model._flatten_layers()
    before = [
        (vars(x), {k: vars(x)[k] for k in _MEMORY if k in vars(x)}) for x in layers
    ]
    try:
        for layer, policy in [(x, choose(x)) for x in layers]:
            if policy is not None and layer.quantization_mode is None:
                layer.dtype_policy = policy
                layer._keras_mp_chosen = layer.dtype_policy
        yield
    finally:
        for attributes, memory in before:
            for name in _MEMORY:
                attributes.pop(name, None)
            attributes.update(memory)


def computes_in_half(layer: Any) -> bool:
    return policy_of(layer).compute_dtype in HALF


def has_half(model: Any) -> bool:
    return any(computes_in_half(layer) for layer in model._flatten_layers())


def policy_name(model: Any) -> str:
    dtypes = [policy_of(layer).compute_dtype for layer in model._flatten_layers()]
    return next((f"mixed_{dtype}" for dtype in HALF if dtype in dtypes), "float32")


def half_policies(model: Any) -> Any:
    """layer -> its policy in a model that is to compute in half precision."""
    if has_half(model):
        return lambda layer: None
    policy = MixedFloat16()
    graph = graph_of(model) if is_graph(model) else None
    kept = [p for t in (graph.outputs if graph else ()) for p in producers(t)]
    kept += [x for x in model._flatten_layers() if policy.decide(x).includes_children]
    within = {id(part) for layer in kept for part in layer._flatten_layers()}
    half = keras.DTypePolicy(policy.name)
    return lambda layer: FLOAT32 if id(layer) in within else half


def with_float32(
    choose: Callable[[Any], keras.DTypePolicy | None], paths: Sequence[str]
) -> Callable[[Any], keras.DTypePolicy | None]:
    """The same choice, but for the layers at these paths and all that they hold."""
    patterns = [re.compile(f"{re.escape(path)}(/.*)?") for path in paths]

    def chosen(layer: Any) -> Any:
        path = layer_path(layer)
        return FLOAT32 if any(p.fullmatch(path) for p in patterns) else choose(layer)

    return chosen
