"""Sums over more elements than float16 can count, as far as shapes tell.

Backends add up in float32 and round the sum once, so a mean is safe and a sum is not:
it may pass 65504, float16's largest number, where its average is small.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras.src.ops.numpy import Sum

from keras_mp.keras_seams import private
from keras_mp.policies.layers import layer_path, policy_of
from keras_mp.policies.rules import LARGEST_EXACT_INTEGER, is_wide_average

layers = keras.layers
_LARGEST = 65504


def long_sums(nodes: Sequence[Any]) -> Iterator[tuple[str, str, str]]:
    """Yields path, sentence and remedy for each such sum in a graph."""
    seen: set[int] = set()
    for node in nodes:
        operation = node.operation
        if id(operation) in seen or not node.input_tensors:
            continue
        seen.add(id(operation))
        if isinstance(operation, layers.Layer):
            if policy_of(operation).compute_dtype != "float16":
                continue
            path, told = layer_path(operation), _in_layer(operation, node)
            remedy = (
                'Give the layer dtype="float32", or keep it there: '
                "keras_mp.MixedFloat16(float32=PATHS)."
            )
        else:
            path, told = operation.name, _in_operation(operation, node)
            remedy = 'Cast to "float32" first, or take the mean.'
        if told:
            yield path, told, remedy


def _in_layer(layer: Any, node: Any) -> str:
    tensor = node.input_tensors[0]
    masked = private.get_keras_mask(tensor) is not None
    if isinstance(layer, layers.GlobalAveragePooling1D) and masked:
        steps = tensor.shape[1 if layer.data_format == "channels_last" else 2]
        return _sum_of(steps, "under a mask it sums")
    if is_wide_average(layer) and keras.backend.backend() != "torch":
        window = math.prod(layer.pool_size)
        return f"on CPUs it sums {window} values in float16, and is far off."
    if getattr(layer, "activity_regularizer", None) is not None:
        shape = node.outputs[0].shape[1:]
        count = None if None in shape else math.prod(shape)
        return _sum_of(count, "its activity_regularizer sums")
    return ""


def _in_operation(operation: Any, node: Any) -> str:
    tensor = node.input_tensors[0]
    if not isinstance(operation, Sum) or node.outputs[0].dtype != "float16":
        return ""
    axes = operation.axis
    if axes is None:
        axes = range(len(tensor.shape))
    sizes = [tensor.shape[a] for a in ([axes] if isinstance(axes, int) else axes)]
    # The batch counts as one example where its size is not known.
    known = [1 if size is None else size for size in sizes]
    return _sum_of(math.prod(known), "it sums")


def _sum_of(count: int | None, what: str) -> str:
    if count is None or count <= LARGEST_EXACT_INTEGER:
        return ""
    return (
        f"{what} {count} elements in float16, which holds no more than {_LARGEST}: "
        f"their average may be {_LARGEST / count:.2g} at most."
    )
