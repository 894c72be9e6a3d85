"""Counts what torch runs: operations that are no views, their bytes, and waits.

It counts on CPUs, which run as many kernels as a GPU, and reads no clock.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from benchmarks.kernels.private import TorchDispatchMode, is_kernel, is_wait


class Count(NamedTuple):
    """What one step runs.

    Attributes:
        kernels: operations that are no views.
        bytes: that they read and write.
        waits: how often Python waits for the device.
        peak: bytes of memory, with those of the state.
    """

    kernels: int
    bytes: int
    waits: int
    peak: int


def count(step: Callable[[], object], state: Iterable[torch.Tensor]) -> Count:
    """Counts what a step runs.

    Args:
        step: the step.
        state: the tensors that it updates, which are there before it.
    """
    with _Counting() as counting:
        step()
    resident = sum(x.untyped_storage().nbytes() for x in state)
    return Count(
        counting.kernels, counting.bytes, counting.waits, resident + counting.peak
    )


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.bytes = self.waits = self.peak = 0
        self._now = 0
        self._living: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given, own = _tensors((args, kwargs)), self._living
        known = {x.untyped_storage().data_ptr() for x in given}
        result = function(*args, **(kwargs or {}))
        for x in _tensors(result):
            storage = x.untyped_storage()
            place, size = storage.data_ptr(), storage.nbytes()
            if size and place not in known and place not in own:
                own.add(place)
                self._now += size
                weakref.finalize(storage, self._freed, place, size)
        self.peak = max(self.peak, self._now)
        self.waits += is_wait(function)
        if is_kernel(function):
            self.kernels += 1
            moved = [*given, *_tensors(result)]
            self.bytes += sum(x.numel() * x.element_size() for x in moved)
        return result

    def _freed(self, place: int, size: int) -> None:
        self._living.discard(place)
        self._now -= size


def _tensors(structure: Any) -> list[torch.Tensor]:
    # Our own code: a reference that a library keeps makes torch copy a gradient.
    if isinstance(structure, torch.Tensor):
        return [structure]
    if isinstance(structure, dict):
        structure = structure.values()
    elif not isinstance(structure, list | tuple):
        return []
    return [x for part in structure for x in _tensors(part)]
