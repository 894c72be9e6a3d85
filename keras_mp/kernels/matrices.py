"""Turns Keras operations that are one product of two matrices into that product.

Some backends take half-precision operands and return float32 only for such a product.
It sums over the last axes of one tensor and the first axes of the other. Batched
products and convolutions with larger kernels are not such products.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_mp.types import Tensor

# Two matrices, and what turns their product into the result of the operation.
Matrices = tuple[Any, Any, Callable[[Any], Any]]

_ONE_PRODUCT = re.compile(r"((?:\.{3})?\w*)(\w+),\2(\w*)->\1\3")


def _of_matmul(x1: Tensor, x2: Tensor) -> Matrices | None:
    x1, x2 = map(ops.convert_to_tensor, (x1, x2))
    if len(x1.shape) < 2 or len(x2.shape) != 2:
        return None
    return _matrices(x1, x2, 1)


def _of_einsum(subscripts: str, *operands: Any, **options: Any) -> Matrices | None:
    found = _ONE_PRODUCT.fullmatch(subscripts.replace(" ", ""))
    if found is None or options or len(operands) != 2:
        return None
    # An axis that is named more often is a diagonal, or a batch axis.
    axes = "".join(found.groups()).replace(".", "")
    if len(set(axes)) < len(axes):
        return None
    x, kernel = map(ops.convert_to_tensor, operands)
    return _matrices(x, kernel, len(found[2]))


def _of_conv(
    inputs: Any,
    kernel: Tensor,
    strides: Any = 1,
    padding: str = "valid",
    data_format: str | None = None,
    dilation_rate: Any = 1,
) -> Matrices | None:
    # A kernel of one pixel only mixes channels: padding and dilation change nothing.
    last = (data_format or keras.config.image_data_format()) == "channels_last"
    *size, in_channels, out_channels = kernel.shape
    steps = {strides} if isinstance(strides, int) else set(strides)
    grouped = inputs.shape[-1 if last else 1] != in_channels
    if set(size) != {1} or steps != {1} or grouped:
        return None
    kernel = ops.reshape(kernel, (in_channels, out_channels))
    if last:
        return _matrices(inputs, kernel, 1)
    a, b, shaped = _matrices(ops.moveaxis(inputs, 1, -1), kernel, 1)
    return a, b, lambda product: ops.moveaxis(shaped(product), -1, 1)


OPERATIONS: dict[str, Callable] = {
    "matmul": _of_matmul,
    "einsum": _of_einsum,
    "conv": _of_conv,
}


def _matrices(x: Tensor, kernel: Tensor, summed: int) -> Matrices:
    """The product over `summed` axes: the last of x and the first of the kernel."""
    rows, columns = ops.shape(x)[:-summed], kernel.shape[summed:]
    width = math.prod(kernel.shape[:summed])
    a = ops.reshape(x, (-1, width))
    b = ops.reshape(kernel, (width, math.prod(columns)))
    return a, b, lambda product: ops.reshape(product, (*rows, *columns))
