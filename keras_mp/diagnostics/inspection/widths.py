"""Widths that tensor cores dislike.

NVIDIA, Train With Mixed Precision, "Tensor Core Math": in half precision the sizes of
a matrix product should be multiples of 8, or it is padded or runs without them.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from keras_mp.policies.layers import layer_path, policy_of
from keras_mp.policies.policy import HALF

layers = keras.layers
_MULTIPLE = 8
# An image has as many channels as it has, and libraries pad these.
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


def odd_widths(computing: Sequence[Any]) -> Iterator[tuple[str, str, str]]:
    """Yields path, sentence and remedy for each layer with such a width."""
    found: dict[str, list[int]] = {}
    for layer in computing:
        policy = policy_of(layer)
        quantized = policy.quantization_mode is not None
        if policy.compute_dtype in HALF and layer.built and not quantized:
            odd = [n for n in _widths(layer) if n % _MULTIPLE]
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


def _widths(layer: Any) -> Iterator[int]:
    """The input and output features of the matrix products that a layer makes."""
    # Not `kernel`, which adds up the parts of a low-rank adaptation.
    kernel = vars(layer).get("_kernel", None)
    if isinstance(layer, layers.EinsumDense):
        inputs, axes = layer.equation.split("->")[0].split(",")
        sizes = list(zip(axes, kernel.shape, strict=True))
        features = [
            math.prod(size for axis, size in sizes if (axis in inputs) is contracted)
            for contracted in (True, False)
        ]
    elif isinstance(layer, (layers.Dense, *_CONVOLUTIONS)):
        kernel = layer.kernel if kernel is None else kernel
        features = list(kernel.shape[-2:])
    elif isinstance(layer, _SEPARABLE):
        features = list(layer.pointwise_kernel.shape[-2:])
    elif isinstance(layer, _CELLS):
        features = [layer.kernel.shape[0], layer.units]
    elif isinstance(layer, layers.MultiHeadAttention):
        features = [layer.key_dim, layer.value_dim]
    elif isinstance(layer, layers.GroupQueryAttention):
        features = [layer.head_dim]
    else:
        features = []
    for size in features:
        if size > _CHANNELS:
            yield size
