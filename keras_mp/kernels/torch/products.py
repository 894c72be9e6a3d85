"""Products with half-precision operands and float32 results, on NVIDIA's GPUs.

Only `torch.mm` computes them, for two matrices. Other products, and products on other
devices, stay in float32. CPUs multiply float16 a hundred times slower than float32.
"""

from collections.abc import Callable
from typing import Any

import torch
from keras import ops

from keras_mp.backends.interface import Wrapper
from keras_mp.kernels import matrices, products
from keras_mp.kernels.torch import logits
from keras_mp.repairs.products import HalfOperands
from keras_mp.types import Tensor

# torch has had the kernel since 2.8; ROCm refuses it.
_KNOWN = hasattr(torch.ops.aten.mm, "dtype") and torch.version.hip is None
DEVICES = ("cuda",) if _KNOWN else ()


def kernels() -> dict[str, Wrapper]:
    return products.kernels(_product, _have_kernel, **matrices.OPERATIONS)


def _have_kernel() -> bool:
    # Keras moves an operation's tensors to the device where it creates new ones.
    return ops.empty(()).device.type in DEVICES


def _product(shaped: Callable, a: Tensor, b: Tensor, operands: HalfOperands) -> Any:
    result = shaped(half_product(a, b, operands))
    logits.note(result, logits.Product(a, b, operands))
    return result


def half_product(a: Tensor, b: Tensor, operands: HalfOperands) -> Any:
    half, gradient = (getattr(torch, dtype) for dtype in operands[:2])
    return _half_product(a, b, half, gradient, operands.tied)


def product_in_float32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The float32 product of two matrices of one dtype."""
    options = {} if a.dtype == torch.float32 else {"out_dtype": torch.float32}
    return torch.mm(a, b, **options)


def _half_product(a: Tensor, b: Tensor, *options: Any) -> Any:
    # torch.compile refuses functions with a forward derivative.
    compiling = torch.compiler.is_compiling()
    function = HalfProduct if compiling else HalfProductWithJvp
    return function.apply(a, b, *options)


class HalfProduct(torch.autograd.Function):
    """The product of two matrices, with its derivative, which torch lacks."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        a: torch.Tensor,
        b: torch.Tensor,
        half: torch.dtype,
        gradient: torch.dtype,
        tied: bool,
    ) -> torch.Tensor:
        return torch.mm(a.to(half), b.to(half), out_dtype=torch.float32)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        a, b, _, ctx.gradient, ctx.tied = inputs
        # Saves these, not their casts: a second derivative would end at the casts.
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        a, b = ctx.saved_tensors
        cast_grad = grad.to(ctx.gradient)
        da = db = None
        if ctx.needs_input_grad[0]:
            da = torch.mm(cast_grad, b.to(ctx.gradient).T).to(a.dtype)
        if ctx.needs_input_grad[1]:
            if ctx.tied and ctx.gradient != torch.float32:
                db = _half_product(a.T, grad, ctx.gradient, ctx.gradient, False)
            else:
                db = torch.mm(a.to(ctx.gradient).T, cast_grad).to(b.dtype)
        return da, db, None, None, None


class HalfProductWithJvp(HalfProduct):
    """The same product, with a forward derivative too."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        HalfProduct.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:2])

    @staticmethod
    def jvp(ctx: Any, da: torch.Tensor, db: torch.Tensor, *_: None) -> torch.Tensor:
        a, b, da, db = (x.to(ctx.gradient) for x in (*ctx.saved_tensors, da, db))
        return torch.mm(da, b).float() + torch.mm(a, db).float()
