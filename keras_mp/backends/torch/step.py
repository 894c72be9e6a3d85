"""A step on torch: it is eager, so a Python `if` decides."""

import collections
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import distributed

from keras_mp.backends import own_methods
from keras_mp.backends.step import INFINITE, NAN, Step
from keras_mp.backends.torch import rounding
from keras_mp.backends.torch.private import memory_of, unscale_and_check
from keras_mp.backends.torch.sharding import local
from keras_mp.types import Gradients, Tensor, Variables

# Devices with one kernel for Adam's update, and one that checks all gradients.
HAVE_KERNELS = ("cpu", "cuda")


def unscale(grads: Gradients, inverse_scale: Tensor) -> list[Any]:
    return [None if g is None else g.to(_wide(g)).mul(inverse_scale) for g in grads]


def _wide(grad: torch.Tensor) -> torch.dtype:
    return torch.float64 if grad.dtype == torch.float64 else torch.float32


def unscale_in_place(
    grads: Gradients, scale: Tensor, variables: Variables
) -> tuple[list[Any], torch.Tensor] | None:
    present = [local(g) for g in grads if g is not None]
    device = present[0].device
    alike = all(g.layout == torch.strided and g.device == device for g in present)
    in_one_kernel = unscale_and_check()
    if not alike or device.type not in HAVE_KERNELS or in_one_kernel is None:
        return None
    own = _own_memory(grads, variables)
    unscaled = [
        g if g is None or i in own else g.detach().to(_wide(g), copy=True)
        for i, g in enumerate(grads)
    ]
    found = torch.zeros((), device=device)
    parts = [local(g) for g in unscaled if g is not None]
    in_one_kernel(parts, found, scale.reciprocal())
    return unscaled, found


def _own_memory(grads: Gradients, variables: Variables) -> set[int]:
    """Which gradients are their variable's wide `.grad`, in memory of their own."""
    parts: list[Any] = [None if g is None else local(g) for g in grads]
    users = collections.Counter(memory_of(p) for p in parts if p is not None)
    return {
        index
        for index, (grad, variable) in enumerate(zip(grads, variables, strict=True))
        if grad is not None
        and grad is variable.value.grad
        and grad.dtype == _wide(grad)
        and not grad.requires_grad
        and users[memory_of(parts[index])] == 1
        and 0 not in parts[index].stride()
    }


def check(
    tensors: Sequence[Any], found: torch.Tensor | None = None
) -> tuple[bool, torch.Tensor]:
    tensors = [None if x is None else local(x) for x in tensors]
    found = found_in(tensors) if found is None else found
    # The only wait for the device in a step; here all processes agree.
    if not highest_of_all_processes(found):
        return True, torch.zeros(len(tensors), dtype=torch.int8, device=found.device)
    codes = nonfinite(tensors)
    return not codes[:-1].any(), codes


def found_in(tensors: Sequence[Any]) -> torch.Tensor:
    """1.0 if some of these tensors may not be finite, else 0.0."""
    return _may_be_nonfinite([x for x in tensors if x is not None])


def nonfinite(grads: Gradients) -> torch.Tensor:
    device = next(g.device for g in grads if g is not None)
    codes = torch.zeros(len(grads), dtype=torch.int8, device=device)
    for index, grad in enumerate(grads):
        if grad is not None:
            code = INFINITE * grad.isinf().any() + NAN * grad.isnan().any()
            codes[index] = code.clamp(max=NAN)
    return highest_of_all_processes(codes)


def _may_be_nonfinite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Is anything not finite, or too large for its square to be finite?

    The norm takes one pass, in few kernels.
    """
    floating = [x for x in tensors if x.is_floating_point()]  # A loss may be a number.
    return (~torch.isfinite(torch.nn.utils.get_total_norm(floating))).float()


def highest_of_all_processes(values: torch.Tensor) -> torch.Tensor:
    """The maximum over all processes, which all get here in the same step."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX)
    return values


class TorchStep(Step):
    """Its methods without a docstring are those of `Step`."""

    unscale = staticmethod(unscale)
    unscale_in_place = staticmethod(unscale_in_place)
    check = staticmethod(check)
    nonfinite = staticmethod(nonfinite)
    stochastic_rounding = staticmethod(rounding.stochastic_rounding)

    @contextlib.contextmanager
    def plain_updates(self, optimizers: Iterable[Any]) -> Iterator[None]:
        with torch.no_grad(), own_methods.plain_updates(optimizers):
            yield

    def agreed(self, value: torch.Tensor) -> torch.Tensor:
        if distributed.is_available() and distributed.is_initialized():
            value = value.clone()
            distributed.broadcast(value, 0)
        return value

    def is_tracing(self) -> bool:
        """Is torch.compile tracing us?"""
        return torch.compiler.is_compiling()
