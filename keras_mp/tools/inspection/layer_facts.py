"""What each layer of a model computes in, what decided that, and its sizes."""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp import wanted
from keras_mp.backends import engine
from keras_mp.backends.interface import BFLOAT16, HALF
from keras_mp.kernels.table import own as kernels
from keras_mp.policies.choosing import decision_for
from keras_mp.policies.heads import operands_dtype
from keras_mp.policies.layers import children_of, first_input, is_graph, policy_of
from keras_mp.policies.paths import layer_path
from keras_mp.policies.policy import chooser_of
from keras_mp.types import Layer, Model, Variable

_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class LayerFacts:
    """One layer. Sizes are in bytes; what is not known without a run is None.

    Attributes:
        path: the path that the rules see.
        class_name: its class.
        products: for a large head, the dtype of the operands of its products, whose
            results are float32; None if they have its compute dtype.
        compute_dtype: what it computes in; None for a Sequential or Functional model
            within the model, which leaves that to its layers.
        variable_dtype: the dtype of its weights, two joined by ", " if it is a large
            head with a bfloat16 kernel; None as above.
        output_dtype: the dtype of its output in the graph, several joined by ", ".
        decided_by: what decided its policy, such as the name of a rule.
        weight_bytes_float32: its own weights, in float32.
        weight_bytes: its own weights, in their dtype.
        half_copy_bytes: the copies that a call makes in half precision.
        output_bytes_float32: its outputs for one example, in float32.
        output_bytes: its outputs for one example, in their dtype.
    """

    path: str
    class_name: str
    products: str | None
    compute_dtype: str | None
    variable_dtype: str | None
    output_dtype: str | None
    decided_by: str
    weight_bytes_float32: int | None
    weight_bytes: int | None
    half_copy_bytes: int | None
    output_bytes_float32: int | None
    output_bytes: int | None


def layers_of(model: Model) -> list[tuple[Any, Any]]:
    """The layers of a model, each with its parent; parents come before children.

    Inputs are left out. The model itself comes first, with None, unless it is a graph
    and computes nothing.
    """
    found = list(_walk(model, None, set()))
    return found[1:] if is_graph(model) else found


def _walk(layer: Layer, parent: Any, seen: set[int]) -> Iterator[tuple[Any, Any]]:
    if id(layer) not in seen:
        seen.add(id(layer))
        yield layer, parent
        for child in children_of(layer):
            yield from _walk(child, layer, seen)


def facts_of(layer: Layer, parent: Any, nodes: list[Any]) -> LayerFacts:
    """The facts of one layer, given its parent and its calls in a graph."""
    graph = is_graph(layer)
    policy = policy_of(layer)
    outputs = [tensor for node in nodes for tensor in node.outputs]
    inputs = [node.input_tensors for node in nodes] or first_input(layer)
    products = operands_dtype(layer, inputs) if wanted.kernels else None
    dtypes = dict.fromkeys(tensor.dtype for tensor in outputs)
    variables = private.own_variables(layer)
    weights = copied = counted = None
    if layer.built or variables:
        weights = [(v.shape, v.dtype) for v in variables]
        copied = [(v.shape, v.dtype) for v in variables if _is_copied(v, layer)]
        if products:
            full = [v for v in variables if v.dtype == "float32"]
            copied = [(v.shape, v.dtype) for v in full if len(v.shape) > 1]
    if outputs and not graph:  # Those of a graph are counted at its layers.
        counted = [(t.shape[1:], t.dtype) for t in outputs]  # For one example.
    return LayerFacts(
        path=layer_path(layer),
        class_name=type(layer).__name__,
        products=products,
        compute_dtype=None if graph else policy.compute_dtype,
        variable_dtype=None if graph else _variable_dtype(policy, variables),
        output_dtype=", ".join(dtypes) or None,
        decided_by="its layers" if graph else _decided_by(layer, parent, products),
        weight_bytes_float32=_total(weights, "float32"),
        weight_bytes=_total(weights),
        half_copy_bytes=_total(copied, products or policy.compute_dtype),
        output_bytes_float32=_total(counted, "float32"),
        output_bytes=_total(counted),
    )


def _variable_dtype(policy: Any, variables: list[Variable]) -> str:
    own = str(policy.variable_dtype)
    dtypes = {own, *(v.dtype for v in variables if v.dtype == BFLOAT16)}
    return ", ".join(sorted(dtypes))


def _decided_by(layer: Layer, parent: Any, products: str | None) -> str:
    decision, policy = decision_for(layer), policy_of(layer)
    if decision is not None and decision.rule and products:
        return (
            f"{decision.rule.name}; products in {products}, results in float32"
            f"{kernels.HALF_PRODUCTS}"
        )
    if decision is not None:
        in_cudnn = isinstance(layer, engine.float32_in_cudnn)
        by_policy = "policy; float32 in cuDNN" if in_cudnn else "policy"
        return decision.rule.name if decision.rule else by_policy
    if chooser_of(policy) is not None:
        return "its first call will"
    if policy.quantization_mode is not None:
        return "quantized"
    if policy is keras.config.dtype_policy():
        return "global policy"
    if parent is not None and policy is policy_of(parent):
        return "its parent"
    return "its own dtype"


def _is_copied(variable: Variable, layer: Layer) -> bool:
    dtype = layer.compute_dtype
    return (
        dtype in HALF
        and layer.autocast
        and private.is_autocast(variable)
        and variable.dtype in _BYTES
        and variable.dtype != dtype
    )


def _total(tensors: list[tuple[Any, str]] | None, dtype: str = "") -> int | None:
    """The bytes of tensors of these shapes and dtypes; None if a size is not known."""
    if tensors is None or any(None in shape for shape, _ in tensors):
        return None
    return sum(_size(shape, own, dtype) for shape, own in tensors)


def _size(shape: Any, dtype: str, instead: str) -> int:
    """The bytes of a tensor; floats count in the dtype `instead`, if there is one."""
    if dtype in _BYTES:
        each = _BYTES[instead or dtype]
    else:
        bits = re.search(r"\d+", dtype)  # "int32", "float8_e4m3fn"; "bool" has none.
        each = max(1, int(bits[0]) // 8) if bits else 1
    return math.prod(shape) * each
