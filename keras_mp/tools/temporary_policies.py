"""The policies that the layers of a model compute under for a while."""

import re
from collections.abc import Sequence
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp.backends.interface import BFLOAT16, HALF
from keras_mp.policies.layers import is_graph, policy_of
from keras_mp.policies.outputs import producers
from keras_mp.policies.paths import layer_path
from keras_mp.policies.policy import FLOAT32, MixedFloat16
from keras_mp.policies.symbolic import graph_of
from keras_mp.policies.temporary import Choice, computes_in_half
from keras_mp.types import Layer, Model


def layers_in_half(model: Model) -> set[int]:
    """The ids of the layers of a model that compute in half precision."""
    return {id(x) for x in private.layers_in(model) if computes_in_half(x)}


def is_in_half(operation: Any, half: set[int]) -> bool:
    """Does a layer, or an operation of a graph, compute in half precision?

    An operation of a graph computes in the dtype of its inputs.
    """
    return id(operation) in half or not isinstance(operation, keras.layers.Layer)


def policy_name(model: Model) -> str:
    policies = [policy_of(layer) for layer in private.layers_in(model)]
    dtypes = [policy.compute_dtype for policy in policies]
    name = next((f"mixed_{dtype}" for dtype in HALF if dtype in dtypes), "float32")
    in_weights = any(policy.variable_dtype == BFLOAT16 for policy in policies)
    return BFLOAT16 if in_weights and name == "mixed_bfloat16" else name


def half_policies(model: Model) -> Choice:
    """The policies of a model's layers in half precision: its own, or float16's."""
    if layers_in_half(model):
        return lambda layer: None
    policy = MixedFloat16()
    graph = graph_of(model) if is_graph(model) else None
    kept = [p for t in (graph.outputs if graph else ()) for p in producers(t)]
    kept += [x for x in private.layers_in(model) if policy.decide(x).includes_children]
    within = {id(part) for layer in kept for part in private.layers_in(layer)}
    half = keras.DTypePolicy(policy.name)
    return lambda layer: FLOAT32 if id(layer) in within else half


def in_the_half(choose: Choice, dtype: str) -> Choice:
    """The same choice, with `dtype` in place of the other half dtype."""
    policy = keras.DTypePolicy(f"mixed_{dtype}")

    def chosen(layer: Layer) -> Any:
        own = choose(layer) or policy_of(layer)
        other = own.compute_dtype in HALF and own.compute_dtype != dtype
        return policy if other else choose(layer)

    return chosen


def in_float32(layer: Layer) -> keras.DTypePolicy:
    """Chooses float32 for every layer."""
    return FLOAT32


def with_float32(choose: Choice, paths: Sequence[str]) -> Choice:
    """The same choice, with the layers at these paths, and within them, in float32."""
    patterns = [re.compile(f"{re.escape(path)}(/.*)?") for path in paths]

    def chosen(layer: Layer) -> Any:
        path = layer_path(layer)
        return FLOAT32 if any(p.fullmatch(path) for p in patterns) else choose(layer)

    return chosen
