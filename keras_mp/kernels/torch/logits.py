"""Tells the loss how the logits that it reads were made, by a large head."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from keras import ops
from torch.autograd import forward_ad

from keras_mp.backends.interface import Wrapper
from keras_mp.backends.known import IN_USE, Known
from keras_mp.backends.torch.private import is_transformed
from keras_mp.repairs.products import HalfOperands
from keras_mp.types import Tensor


class Product(NamedTuple):
    """A product of (rows, k) and (k, classes), and a bias (classes,) or None."""

    inputs: torch.Tensor
    kernel: torch.Tensor
    operands: HalfOperands
    bias: torch.Tensor | None = None


known: Known[Product] = Known()
IN_USE.append(known.facts)


def note(logits: torch.Tensor, product: Product) -> None:
    """Remembers how logits (..., classes) that `backward` differentiates were made."""
    if torch.compiler.is_compiling() or not logits.requires_grad:
        return
    if is_transformed(logits) or forward_ad.unpack_dual(logits).tangent is not None:
        return
    in_order = logits.ndim > 1 and logits.is_contiguous()
    if in_order and logits.shape[-1] == product.kernel.shape[1]:
        known.note(logits, product)


def kernels() -> dict[str, Wrapper]:
    return {"add": _add}


def _add(original: Callable) -> Callable:
    @functools.wraps(original)
    def add(x1: Tensor, x2: Tensor) -> Any:
        result = original(x1, x2)
        product = known.get(x1) if known.facts else None
        if product is not None and product.bias is None:
            bias = ops.convert_to_tensor(x2).flatten()  # A convolution's has more axes.
            if bias.shape == result.shape[-1:] and bias.dtype == result.dtype:
                note(result, product._replace(bias=bias))
        return result

    return add
