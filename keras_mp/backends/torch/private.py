"""The private names of torch that keras_mp uses, each with the reason.

They are looked up where they are used. Without one torch's public ways are taken.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch


def is_transformed(x: torch.Tensor) -> bool:
    """Does a tensor belong to `torch.vmap` or `torch.func`?

    It must not leave them, and they do not know a function of ours that defines its own
    derivative. No public name tells.
    """
    tells = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", None)
    return tells is None or tells(x)


def is_watched(x: torch.Tensor) -> bool:
    """Does somebody want the gradient of a tensor that is not a leaf?

    There is no public name for the hooks that `register_hook` adds.
    """
    return bool(x.retains_grad or x._backward_hooks)


def has_hooks(parameter: torch.Tensor) -> bool:
    """Does somebody change, or look at, its gradient as it comes?"""
    own = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return any(own)


def is_view(x: torch.Tensor) -> bool:
    """Does a tensor share the memory of the tensor that it was made from?"""
    return bool(x._is_view())


def memory_of(x: torch.Tensor) -> int:
    """Names where a tensor is; in a trace, which has no addresses, its whole memory."""
    try:
        return x.data_ptr()
    except RuntimeError:
        return x.untyped_storage()._cdata


def writes_to(x: torch.Tensor) -> int:
    """How often a tensor was written to in place, by whomever.

    No public name tells whether somebody has.
    """
    return x._version


def unscale_and_check() -> Callable | None:
    """Multiplies gradients in place and finds what is not finite, in one kernel.

    It is that of `torch.amp.GradScaler`, whose public methods need a torch optimizer.
    """
    return getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", None)


def fused_adam() -> Callable:
    """Adam in one kernel, if this torch has it: see `kernels/table.py`.

    `torch.optim.Adam(fused=True)` keeps the moments itself, and adds epsilon in another
    place than Keras.
    """
    return torch._fused_adam_


def copy_all(copies: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copies many tensors into others in one kernel. The public `copy_` takes one."""
    at_once = getattr(torch, "_foreach_copy_", None)
    if at_once is not None:
        at_once(copies, values)
        return
    for copy, value in zip(copies, values, strict=True):
        copy.copy_(value)


# Multiplies each of many tensors by a number of its own, in place and in one kernel.
MULTIPLY_ALL = torch.ops.aten._foreach_mul_.ScalarList
# The views that need not ask how a tensor lies in memory.
RESHAPES = torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default


def is_operator(target: Any) -> bool:
    """Is it an operator of `torch.ops`, as the nodes of a trace call them?"""
    return isinstance(target, torch._ops.OpOverload)


def shares_memory(operator: Any) -> bool:
    """May what an operator returns be in the memory of its first argument?"""
    return any(x.alias_info is not None for x in operator._schema.returns)


def writes_into(operator: Any) -> list[int]:
    """The places of the arguments that an operator writes into."""
    kinds = enumerate(x.alias_info for x in operator._schema.arguments)
    return [i for i, kind in kinds if kind is not None and kind.is_write]


def native(operator: Any) -> Callable:
    """What runs an operator of `torch.ops`, without Python around it."""
    return getattr(operator, "_op", operator)


def below_autograd() -> contextlib.AbstractContextManager:
    """A context in which operators neither derive nor ask whether they have to.

    `torch.no_grad` still lets each of them ask.
    """
    guard = getattr(torch._C, "_AutoDispatchBelowAutograd", contextlib.nullcontext)
    return guard()
