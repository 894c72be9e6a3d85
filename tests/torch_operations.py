"""The operations that torch runs, by their names."""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# By these a tensor becomes a number, or its numbers decide how large another one is.
READS = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "_unique2",
}
# These read a tensor without an operation.
METHODS = {"__array__", "cpu", "tolist"}
# Every tensor that is made of numbers of Python's or NumPy's comes from this one. On a
# GPU a copy from the host follows.
MADE_OF_NUMBERS = "lift_fresh"


class Operations(TorchDispatchMode):
    """Notes them, those of the backward pass too."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


class Waits(Operations):
    """Notes what would wait for a GPU: reads of tensors, and copies from the host.

    On a CPU nothing waits, but the same operations run.
    """

    def __enter__(self):
        self._methods = _Methods(self.names)
        self._methods.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._methods.__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name == "index" and any(_is_mask(x) for x in args[1]):
            self.names.append("nonzero")  # It runs within.
        return super().__torch_dispatch__(function, types, args, kwargs)

    def noted(self):
        return [x for x in self.names if x in READS | METHODS | {MADE_OF_NUMBERS}]


def _is_mask(index):
    return index is not None and index.dtype == torch.bool


class _Methods(TorchFunctionMode):
    def __init__(self, names):
        super().__init__()
        self._names = names

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in METHODS:
            self._names.append(function.__name__)
        return function(*args, **(kwargs or {}))
