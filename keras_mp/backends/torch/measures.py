"""What torch says about gradients, devices, and the memory of a training."""

import warnings
from collections.abc import Callable
from typing import Any

import keras
import torch
from torch import cuda

from keras_mp.backends.devices import Device, parse_capability
from keras_mp.backends.interface import HALF
from keras_mp.backends.measures import WIDE_INTEGERS, IntegerCast, Measures
from keras_mp.backends.torch.private import is_transformed
from keras_mp.types import Tensor


def differentiate(
    function: Callable, arguments: Any, variables: Any, state: Any, compiled: bool
) -> tuple[Any, list, list, list]:
    seen: list[Any] = []

    def see(x: Tensor) -> tuple[Any, bool]:
        # A tensor inside torch.vmap must not leave it.
        here = isinstance(x, torch.Tensor) and not is_transformed(x)
        if not (here and x.is_floating_point()):
            return x, False
        # Nothing is known of another tensor, so the loss does not bypass it.
        seen.append(x.view_as(x))
        return seen[-1], True

    # Keras assigns in place, though the graph may need the old value, as for a stateful
    # LSTM's states. In this scope Keras only notes what is assigned.
    ids = {id(v) for v in variables}
    values = [(v, v.value) for v in state if id(v) not in ids]
    # A Dropout without a seed draws from torch's own generators.
    with torch.enable_grad(), torch.random.fork_rng():
        with keras.StatelessScope(values, collect_losses=True):
            loss = function(arguments, see)
        wanted = [*(v.value for v in variables), *seen]
        asked = [i for i, x in enumerate(wanted) if x.requires_grad]
        found: list[Any] = [None] * len(wanted)
        # A frozen model may have nothing to differentiate by, or a loss that depends
        # on none of it.
        if asked and loss.requires_grad:
            inputs = [wanted[i] for i in asked]
            by_input = torch.autograd.grad(loss, inputs, allow_unused=True)
            for i, gradient in zip(asked, by_input, strict=True):
                found[i] = gradient
    seen = [x.detach() for x in seen]
    count = len(variables)
    return loss.detach(), seen, found[count:], found[:count]


def sums_of_bits(value: torch.Tensor) -> torch.Tensor:
    integers = getattr(torch, f"int{8 * value.element_size()}")
    return value.detach().view(integers).sum(tuple(range(value.ndim - 1)) or None)


class _Casts(torch.overrides.TorchFunctionMode):
    """Notes the casts of half-precision numbers to integers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[IntegerCast] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _CASTING:
            source, target = (str(x.dtype).split(".")[-1] for x in (args[0], result))
            if source in HALF and target in WIDE_INTEGERS:
                self.found.append(IntegerCast("", source, target))
        return result


_CASTING = {torch.Tensor.to, torch.Tensor.int, torch.Tensor.long, torch.Tensor.short}


def integer_casts(call: Callable[[], Any]) -> list[IntegerCast]:
    # torch traces no program, so the call runs.
    with torch.no_grad(), torch.random.fork_rng(), _Casts() as casts:
        call()
    return casts.found


def list_devices() -> list[Device]:
    # With a broken driver a CUDA build of torch warns and says that there is no GPU.
    # That is a failure, not an answer.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = cuda.is_available()
    troubles = [w for w in caught if issubclass(w.category, UserWarning)]
    if troubles and not found:
        raise RuntimeError(str(troubles[0].message))

    cpu = Device("cpu", "cpu")
    if found:
        return [cpu, *map(_gpu, range(cuda.device_count()))]
    if torch.backends.mps.is_available():
        return [cpu, Device("metal", "Apple GPU (MPS)")]
    if torch.xpu.is_available():
        return [cpu, Device("xpu", torch.xpu.get_device_name(0))]
    return [cpu]


def _gpu(index: int) -> Device:
    name = cuda.get_device_name(index)
    # ROCm answers under CUDA's name, with AMD's own numbers: a capability of (9, 4) is
    # not a Hopper GPU there.
    if torch.version.hip:
        return Device("rocm", name)
    return Device("cuda", name, parse_capability(cuda.get_device_capability(index)))


def measure_memory() -> Callable[[], int | None]:
    """The peak of all NVIDIA and AMD GPUs; torch does not count other devices."""
    devices = range(cuda.device_count() if cuda.is_available() else 0)
    before = sum(cuda.memory_allocated(device) for device in devices)
    for device in devices:
        cuda.reset_peak_memory_stats(device)
    return lambda: (
        sum(cuda.max_memory_allocated(device) for device in devices) - before
        if devices
        else None
    )


class TorchMeasures(Measures):
    """Its attributes are those of `Measures`."""

    traces = False
    differentiate = staticmethod(differentiate)
    sums_of_bits = staticmethod(sums_of_bits)
    integer_casts = staticmethod(integer_casts)
    list_devices = staticmethod(list_devices)
    measure_memory = staticmethod(measure_memory)
    why_no_memory = "torch only counts the memory of NVIDIA and AMD GPUs"
