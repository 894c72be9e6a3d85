"""What each layer of a model computes in, who decided that, and how large it is."""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import keras

from keras_mp.policies.choosing import decision_for
from keras_mp.policies.layers import children_of, is_graph, layer_path, policy_of
from keras_mp.policies.policy import HALF, chooser_of

_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class LayerFacts:
    """One layer. Sizes are in bytes; None is what is not known without a run.

    Attributes:
        path: the path that the rules see.
        class_name: its class.
        compute_dtype: what it computes in; None for a Sequential or Functional model
            within the model, which leaves that to its layers.
        variable_dtype: what its weights are kept in; None as above.
        output_dtype: the dtype of its output in the graph, several joined by ", ".
        decided_by: the rule that decided, or who did.
        weight_bytes_float32: of its own weights, in float32.
        weight_bytes: of its own weights, as they are kept.
        half_copy_bytes: of the copies that a call makes in half precision.
        output_bytes_float32: of its outputs for one example, under float32.
        output_bytes: of its outputs for one example.
    """

    path: str
    class_name: str
    compute_dtype: str | None
    variable_dtype: str | None
    output_dtype: str | None
    decided_by: str
    weight_bytes_float32: int | None
    weight_bytes: int | None
    half_copy_bytes: int | None
    output_bytes_float32: int | None
    output_bytes: int | None


def layers_of(model: Any) -> list[tuple[Any, Any]]:
    """The layers of a model with what holds them, parents before children.

    Without Inputs. The model itself is among them, held by None, unless it is a graph
    and computes nothing.
    """
    found = list(_walk(model, None, set()))
    return found[1:] if is_graph(model) else found


def _walk(layer: Any, parent: Any, seen: set[int]) -> Iterator[tuple[Any, Any]]:
    if id(layer) not in seen:
        seen.add(id(layer))
        yield layer, parent
        for child in children_of(layer):
            yield from _walk(child, layer, seen)


def facts_of(layer: Any, parent: Any, nodes: list[Any]) -> LayerFacts:
    """The facts of one layer, given what holds it and its calls in a graph."""
    shell = is_graph(layer)
    policy = policy_of(layer)
    outputs = [tensor for node in nodes for tensor in node.outputs]
    dtypes = dict.fromkeys(tensor.dtype for tensor in outputs)
    weights = layer._trainable_variables + layer._non_trainable_variables
    # A graph's outputs are those of its layers, and counted there.
    counted = None if shell or not outputs else outputs
    return LayerFacts(
        path=layer_path(layer),
        class_name=type(layer).__name__,
        compute_dtype=None if shell else policy.compute_dtype,
        variable_dtype=None if shell else policy.variable_dtype,
        output_dtype=", ".join(dtypes) or None,
        decided_by="its layers" if shell else _decided_by(layer, parent),
        weight_bytes_float32=_weight_bytes(layer, weights, "float32"),
        weight_bytes=_weight_bytes(layer, weights),
        half_copy_bytes=_weight_bytes(
            layer, [w for w in weights if _is_copied(w, layer)], policy.compute_dtype
        ),
        output_bytes_float32=_output_bytes(counted, "float32"),
        output_bytes=_output_bytes(counted),
    )


def _decided_by(layer: Any, parent: Any) -> str:
    decision, policy = decision_for(layer), policy_of(layer)
    if decision is not None:
        return decision.rule.name if decision.rule else "policy"
    if chooser_of(policy) is not None:
        return "its first call will"
    if policy.quantization_mode is not None:
        return "quantized"
    if policy is keras.config.dtype_policy():
        return "global policy"
    if parent is not None and policy is policy_of(parent):
        return "its parent"
    return "its own dtype"


def _is_copied(variable: Any, layer: Any) -> bool:
    dtype = layer.compute_dtype
    return (
        dtype in HALF
        and layer.autocast
        and variable._autocast
        and variable.dtype in _BYTES
        and variable.dtype != dtype
    )


def _weight_bytes(layer: Any, weights: list[Any], dtype: str = "") -> int | None:
    if not layer.built and not weights:
        return None
    return sum(_size(w.shape, w.dtype, dtype) for w in weights)


def _output_bytes(tensors: list[Any] | None, dtype: str = "") -> int | None:
    """For one example: without the first dimension."""
    if tensors is None or any(None in tensor.shape[1:] for tensor in tensors):
        return None
    return sum(_size(t.shape[1:], t.dtype, dtype) for t in tensors)


def _size(shape: Any, dtype: str, instead: str) -> int:
    """The bytes of a tensor; if it holds floats, perhaps in another dtype instead."""
    if dtype in _BYTES:
        each = _BYTES[instead or dtype]
    else:
        bits = re.search(r"\d+", dtype)  # "int32", "float8_e4m3fn"; "bool" has none.
        each = max(1, int(bits[0]) // 8) if bits else 1
    return math.prod(shape) * each
