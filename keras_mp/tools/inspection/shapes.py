"""What a model's shapes alone show: sums that are too long, and odd widths.

Backends add up in float32 and round the sum once, so a mean is safe and a sum is not:
it may pass 65504, float16's largest number, though its average is small.

NVIDIA, Train With Mixed Precision, "Tensor Core Math": in half precision the sizes of
a matrix product should be multiples of 8, or it is padded or runs without tensor cores.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp.backends.interface import HALF
from keras_mp.policies.layers import policy_of
from keras_mp.policies.paths import layer_path
from keras_mp.policies.stock_rules import LARGEST_EXACT_INTEGER, is_wide_average
from keras_mp.tools.inspection.custom_layers import is_keras
from keras_mp.types import Layer

layers = keras.layers
_LARGEST = 65504
_MULTIPLE = 8
# An image has up to this many channels: their number is given, and libraries pad them.
_CHANNELS = 4
_CELLS = (layers.LSTMCell, layers.GRUCell, layers.SimpleRNNCell)
_CONVOLUTIONS = (
    layers.Conv1D,
    layers.Conv2D,
    layers.Conv3D,
    layers.Conv1DTranspose,
    layers.Conv2DTranspose,
    layers.Conv3DTranspose,
)
_SEPARABLE = (layers.SeparableConv1D, layers.SeparableConv2D)


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
            path, sentence = layer_path(operation), _in_layer(operation, node)
            remedy = (
                'Give the layer dtype="float32", or keep it there: '
                "keras_mp.MixedFloat16(float32=PATHS)."
            )
        else:
            path, sentence = operation.name, _in_operation(operation, node)
            remedy = 'Cast to "float32" first, or take the mean.'
        if sentence:
            yield path, sentence, remedy


def _in_layer(layer: Layer, node: Any) -> str:
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
    kind = type(operation)  # The class of `ops.sum` has no public name.
    is_sum = kind.__name__ == "Sum" and is_keras(kind)
    if not is_sum or node.outputs[0].dtype != "float16":
        return ""
    axes = operation.axis
    if axes is None:
        axes = range(len(tensor.shape))
    sizes = [tensor.shape[a] for a in ([axes] if isinstance(axes, int) else axes)]
    # A batch of unknown size counts as one example.
    known = [1 if size is None else size for size in sizes]
    return _sum_of(math.prod(known), "it sums")


def _sum_of(count: int | None, what: str) -> str:
    if count is None or count <= LARGEST_EXACT_INTEGER:
        return ""
    return (
        f"{what} {count} elements in float16, which holds no more than {_LARGEST}: "
        f"their average may be {_LARGEST / count:.2g} at most."
    )


def odd_widths(computing: Sequence[Any]) -> Iterator[tuple[str, str, str]]:
    """Yields path, sentence and remedy for each layer with such a width."""
    found: dict[str, list[int]] = {}
    for layer in computing:
        policy = policy_of(layer)
        quantized = policy.quantization_mode is not None
        if policy.compute_dtype in HALF and layer.built and not quantized:
            odd = [n for n in _widths(layer) if n > _CHANNELS and n % _MULTIPLE]
            if odd:
                found[layer_path(layer)] = odd
    odd = sorted({width for widths in found.values() for width in widths})
    shown = ", ".join(map(str, odd[:6])) + (", ..." if len(odd) > 6 else "")
    for path in found:
        yield (
            path,
            f"widths that are no multiples of {_MULTIPLE} ({shown}), which tensor "
            "cores pad or leave to slower units.",
            f"Round them up to multiples of {_MULTIPLE}.",
        )


def _widths(layer: Layer) -> Sequence[int]:
    """The input and output features of the matrix products that a layer makes."""
    if isinstance(layer, layers.EinsumDense):
        inputs, axes = layer.equation.split("->")[0].split(",")
        sizes = list(zip(axes, _kernel_shape(layer), strict=True))
        return [
            math.prod(size for axis, size in sizes if (axis in inputs) is contracted)
            for contracted in (True, False)
        ]
    if isinstance(layer, (layers.Dense, *_CONVOLUTIONS)):
        return _kernel_shape(layer)[-2:]
    if isinstance(layer, _SEPARABLE):
        return layer.pointwise_kernel.shape[-2:]
    if isinstance(layer, _CELLS):
        return [layer.kernel.shape[0], layer.units]
    if isinstance(layer, layers.MultiHeadAttention):
        return [layer.key_dim, layer.value_dim]
    if isinstance(layer, layers.GroupQueryAttention):
        return [layer.head_dim]
    return []


def _kernel_shape(layer: Layer) -> tuple[int, ...]:
    # Not `layer.kernel`, which computes the sum of a kernel and its LoRA.
    return next(weight.shape for weight in layer.weights if weight.name == "kernel")
