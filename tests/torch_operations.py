"""The operations that torch runs, by their names."""

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Notes them, those of the backward pass too."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))
