"""What a traced program does with numbers, on TensorFlow."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_mp.backends.interface import HALF
from keras_mp.backends.measures import (
    SCOPE,
    WIDE_INTEGERS,
    Constant,
    Fact,
    IntegerCast,
    lost_addend,
)
from keras_mp.types import Tensor, Variables

_SUMS = ("Add", "AddV2", "Sub")
# The result of these has the addends of their operand.
_PASSING = (
    *("Abs", "Cast", "Maximum", "Minimum", "Neg", "Relu"),
    *("Identity", "IdentityN", "StopGradient"),
    *("ExpandDims", "Reshape", "Squeeze", "StridedSlice", "Transpose"),
)


def scope(name: str) -> Any:
    return tf.name_scope(name)


def traced(function: Callable, variables: Variables, arguments: Any) -> list[Fact]:
    # Variables are read by operations, so they are not constants.
    specs = keras.tree.map_structure(
        lambda x: tf.TensorSpec(x.shape, x.dtype), arguments
    )
    program = tf.function(function, autograph=False).get_concrete_function(specs)
    # Of the tensors that hold a sum with a constant: the scope and the size of the
    # largest one.
    addends: dict[str, tuple[str, float]] = {}
    found: list[Fact] = []
    for operation in program.graph.get_operations():
        found += _sums(operation, addends)
        found += _casts(operation)
        found += _constants(operation)
    return found


def _scope_of(name: str) -> str:
    names = re.findall(SCOPE, name)
    return names[-1] if names else ""


def _sums(operation: Any, addends: dict[str, tuple[str, float]]) -> Iterator[Fact]:
    if operation.type not in (*_SUMS, *_PASSING):
        return
    name = _scope_of(operation.name)
    # IdentityN has as many results as operands, the others have one.
    groups = [operation.inputs]
    if operation.type == "IdentityN":
        groups = [[x] for x in operation.inputs]
    for out, inputs in zip(operation.outputs, groups, strict=True):
        found = [addends[x.name] for x in inputs if x.name in addends]
        if operation.type in _SUMS:
            numbers = [x for x in map(_scalar, inputs) if x is not None]
            found += [(name, abs(float(x))) for x in numbers]
            yield from lost_addend(name, found, out.dtype.name)
        if found:
            addends[out.name] = max(found, key=lambda addend: addend[1])


def _casts(operation: Any) -> Iterator[Fact]:
    if operation.type == "Cast":
        source, target = operation.inputs[0].dtype.name, operation.outputs[0].dtype.name
        if source in HALF and target in WIDE_INTEGERS:
            yield IntegerCast(_scope_of(operation.name), source, target)


def _constants(operation: Any) -> Iterator[Fact]:
    value = _scalar(operation.outputs[0]) if operation.type == "Const" else None
    if value is None:
        return
    uses = operation.outputs[0].consumers()
    casts = [use for use in uses if use.type == "Cast"]
    if uses and len(casts) == len(uses):
        # What counts is what it is cast to.
        turned = [(c.name, c.outputs[0].dtype.as_numpy_dtype) for c in casts]
    else:
        turned = [(operation.name, value.dtype)]
    for name, dtype in turned:
        number = value.astype(dtype)
        if keras.backend.is_float_dtype(number.dtype.name):
            yield Constant(_scope_of(name), float(number), number.dtype.name)


def _scalar(tensor: Tensor) -> np.ndarray | None:
    """The value of a constant with one element, cast or not."""
    operation = tensor.op
    if operation.type == "Cast":
        value = _scalar(operation.inputs[0])
        return None if value is None else value.astype(tensor.dtype.as_numpy_dtype)
    if operation.type != "Const":
        return None
    value = tf.make_ndarray(operation.get_attr("value"))
    return value.reshape(()) if value.size == 1 else None
