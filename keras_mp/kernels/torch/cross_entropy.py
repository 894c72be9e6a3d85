"""The cross-entropy of a large head, differentiated in chunks of the classes.

Neither the gradient of the logits nor their log-probabilities are ever whole in memory.
The logits are: a head returns them before it is known what will read them. This is
known as fused linear cross-entropy (Hsu et al. 2024, Liger Kernel).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from keras import ops

from keras_mp.backends.interface import Wrapper
from keras_mp.backends.torch.private import is_watched
from keras_mp.kernels.products import size_of_chunk
from keras_mp.kernels.torch.logits import known
from keras_mp.kernels.torch.products import half_product, product_in_float32
from keras_mp.repairs.products import HalfOperands
from keras_mp.types import Tensor

_IGNORED = -100  # The label that torch ignores.
# Bytes of logits. A GPU's pass over this many takes longer than its launch in Python.
_CHUNK = 2**26


def kernels() -> dict[str, Wrapper]:
    return {"sparse_categorical_crossentropy": _loss}


def number_of_chunks(rows: int, classes: int, logits: str = "in chunks") -> int:
    """The number of chunks for logits (rows, classes); 0 if they are small."""
    number = math.ceil(4 * rows * classes / _CHUNK)
    return number if number > 1 else 0


def _loss(original: Callable) -> Callable:
    @functools.wraps(original)
    def loss(
        target: Any, output: Tensor, from_logits: bool = False, axis: int = -1
    ) -> Any:
        product = known.get(output)
        is_last = axis in (-1, getattr(output, "ndim", 0) - 1)
        if product is None or not (from_logits and is_last) or is_watched(output):
            return original(target, output, from_logits, axis)
        labels = ops.convert_to_tensor(target, "int64")
        if labels.ndim == output.ndim and labels.shape[-1] == 1:
            labels = labels.squeeze(-1)
        number = number_of_chunks(labels.numel(), output.shape[-1])
        if labels.shape != output.shape[:-1] or not number:
            return original(target, output, from_logits, axis)
        losses = CrossEntropyInChunks.apply(
            *(product.inputs, product.kernel, product.bias, product.operands),
            *(output.detach().flatten(0, -2), labels.flatten(), number),
        )
        return losses.reshape(labels.shape)

    return loss


class CrossEntropyInChunks(torch.autograd.Function):
    """The losses (rows,), differentiated by what made the logits (rows, classes)."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        kernel: torch.Tensor,
        bias: torch.Tensor | None,
        operands: HalfOperands,
        logits: torch.Tensor,
        labels: torch.Tensor,
        number: int,
    ) -> torch.Tensor:
        ctx.operands, ctx.size = operands, size_of_chunk(logits.shape[1], number)
        sums = [torch.logsumexp(part, 1) for part in logits.split(ctx.size, 1)]
        total = torch.logsumexp(torch.stack(sums), 0)
        ctx.save_for_backward(inputs, kernel, bias, logits, labels, total)
        valid = labels != _IGNORED
        own = logits.gather(1, torch.where(valid, labels, 0)[:, None])[:, 0]
        return torch.where(valid, total - own, 0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        inputs, kernel, bias, logits, labels, total = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_differentiable(ctx, grad), None, None, None, None
        wanted_inputs, wanted_kernel, wanted_bias, *_ = ctx.needs_input_grad
        dtype = getattr(torch, ctx.operands.gradient)
        half_inputs = inputs.to(dtype)
        grad = torch.where(labels != _IGNORED, grad, 0)[:, None]
        by_inputs = torch.zeros_like(inputs, dtype=torch.float32)
        by_kernel = torch.empty_like(kernel) if wanted_kernel else None
        by_bias = torch.empty_like(bias) if wanted_bias else None
        for start in range(0, logits.shape[1], ctx.size):
            part = slice(start, start + ctx.size)
            slope = _slope(logits[:, part], labels - start, total).mul_(grad)
            if by_bias is not None:
                by_bias[part] = slope.sum(0)
            slope = slope.to(dtype)
            if wanted_inputs:
                by_inputs += product_in_float32(slope, kernel[:, part].T.to(dtype))
            if by_kernel is not None:
                multiply = product_in_float32 if ctx.operands.tied else torch.mm
                by_kernel[:, part] = multiply(half_inputs.T, slope)
        by_inputs = by_inputs.to(inputs.dtype) if wanted_inputs else None
        return by_inputs, by_kernel, by_bias, None, None, None, None


def _slope(logits: torch.Tensor, labels: torch.Tensor, total: torch.Tensor) -> Any:
    """The probabilities of some classes, less 1 at the label."""
    slope = (logits - total[:, None]).exp_()
    here = (labels >= 0) & (labels < logits.shape[1])
    columns = torch.where(here, labels, 0)[:, None]
    return slope.scatter_add_(1, columns, -here.to(slope.dtype)[:, None])


def _differentiable(ctx: Any, grad: torch.Tensor) -> list[torch.Tensor | None]:
    """Gradients by inputs, kernel and bias that can be differentiated again."""
    inputs, kernel, bias, _, labels, _ = ctx.saved_tensors
    logits = half_product(inputs, kernel, ctx.operands)
    logits = logits if bias is None else logits + bias
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    wanted = ctx.needs_input_grad[:3]
    made_of = [
        x
        for x, is_wanted in zip((inputs, kernel, bias), wanted, strict=True)
        if is_wanted
    ]
    found = iter(torch.autograd.grad(losses, made_of, grad, create_graph=True))
    return [next(found) if is_wanted else None for is_wanted in wanted]
