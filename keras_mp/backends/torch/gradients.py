"""Gradients on torch: unscaled, and checked for what is not finite."""

import collections
from collections.abc import Sequence
from typing import Any

import torch

from keras_mp.backends.engine import INFINITE, NAN


def unscale(
    grads: Sequence[Any], inverse_scale: Any, variables: Sequence[Any] | None = None
) -> list[Any]:
    # In place as by torch's GradScaler: a copy of all gradients costs more than the
    # product.
    wide: list[Any] = [
        None if g is None else g.to(torch.promote_types(g.dtype, torch.float32))
        for g in grads
    ]
    own = _own_memory(wide, variables) if variables is not None else set()
    return [
        None if g is None else (g.mul_ if i in own else g.mul)(inverse_scale)
        for i, g in enumerate(wide)
    ]


def _own_memory(grads: Sequence[Any], variables: Sequence[Any]) -> set[int]:
    """Which gradients are the `.grad` of their variable, and no other's memory."""
    users = collections.Counter(g.data_ptr() for g in grads if g is not None)
    return {
        index
        for index, (grad, variable) in enumerate(zip(grads, variables, strict=True))
        if grad is not None
        and grad is variable.value.grad
        and not grad.requires_grad
        and users[grad.data_ptr()] == 1
        and 0 not in grad.stride()
    }


def nonfinite(grads: Sequence[Any]) -> torch.Tensor:
    present = [g for g in grads if g is not None]
    codes = torch.zeros(len(grads), dtype=torch.int8, device=present[0].device)
    present = [g for g in present if g.is_floating_point()]  # A loss may be a number.
    # The norm takes one pass, in few kernels. Squares overflow at 1.8e19: only then, or
    # where a gradient is not finite, is each checked on its own.
    if not torch.isfinite(torch.nn.utils.get_total_norm(present)):
        for index, grad in enumerate(grads):
            if grad is not None:
                found = INFINITE * grad.isinf().any() + NAN * grad.isnan().any()
                codes[index] = found.clamp(max=NAN)
    return highest_of_all_processes(codes)


def highest_of_all_processes(values: torch.Tensor) -> torch.Tensor:
    """The maximum over all processes, which all come here at the same step."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX)
    return values


def all_finite(codes: torch.Tensor) -> torch.Tensor:
    return ~codes.any()
