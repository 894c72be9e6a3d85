"""A function of tensors as the operators that it calls, to be called without Python.

`make_fx` runs the function once on tensors without values and notes each call of an
operator, those of the derivative as well. What comes of it is Python without a branch:
the same operators in the same order, so the same bits.
"""

import os
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from keras_mp.backends.torch import graphs
from keras_mp.backends.torch.private import (
    below_autograd,
    copy_all,
    has_hooks,
)
from keras_mp.backends.torch.step import found_in
from keras_mp.backends.torch.writes import noted_by
from keras_mp.types import Tensor

# What a step is traced and replayed with.
__all__ = [
    "Kept",
    "Trace",
    "address",
    "found_in",
    "has_hooks",
    "layout",
    "leaf",
    "noted_by",
    "tensor",
    "told",
]


# `make_fx` replaces what belongs to all threads.
_one_at_a_time = threading.Lock()


class Trace:
    """A function that was traced.

    Args:
        function: takes tensors and returns a list of tensors. It may write into those
            that it gets, and may not look at a value. What it returns of them is a
            copy.
        tensors: what it will get: the same shapes, dtypes and devices.

    Attributes:
        draws: whether it draws random numbers.

    Raises:
        Exception: what torch raises if it looks at a value, among others.
    """

    def __init__(self, function: Callable, tensors: Sequence[Tensor]) -> None:
        trace = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)
        with _one_at_a_time:
            module = trace(*tensors)
        graphs.clean(module.graph)
        graphs.fold_numbers(module)
        graphs.multiply_together(module.graph)
        graphs.copy_inputs(module.graph)
        self.draws = graphs.draws(module.graph)
        self._run = graphs.compiled(module)

    def __call__(self, *tensors: Tensor) -> list[torch.Tensor]:
        """What the function returns; without gradients."""
        with torch.no_grad(), below_autograd():
            return self._run(*tensors)


class Kept:
    """Copies of tensors, in memory that is kept from step to step."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        alike: dict[Any, list[torch.Tensor]] = {}
        for tensor in tensors:
            alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        self._pairs = [([*map(torch.empty_like, x)], x) for x in alike.values()]

    def keep(self) -> None:
        for copies, tensors in self._pairs:
            copy_all(copies, tensors)

    def put_back(self) -> None:
        for copies, tensors in self._pairs:
            copy_all(tensors, copies)


def told(error: Exception) -> str:
    """What could not be traced, as a clause: the innermost line outside of torch."""
    if isinstance(error, GuardOnDataDependentSymNode):
        said = "what it does depends on a value"
    else:
        said = f"{type(error).__name__}: {error}".split("\n")[0]
    of_torch = os.path.dirname(torch.__file__)
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if not f.filename.startswith(of_torch)]
    return f"{said} ({outside[-1].filename}:{outside[-1].lineno}, {outside[-1].line})"


def leaf(x: torch.Tensor, derived: bool = False) -> torch.Tensor:
    """A tensor in the same memory, for whose gradient one may ask, or not."""
    return x.detach().requires_grad_(derived)


def tensor(x: Any) -> torch.Tensor:
    """A tensor, or an array as one, which may be in the same memory."""
    return torch.as_tensor(x)


def layout(x: Any) -> Any:
    """What a trace assumes about such a tensor, or array."""
    x = tensor(x)
    return x.shape, x.stride(), x.dtype, x.device


def address(x: torch.Tensor) -> int:
    return x.data_ptr()
