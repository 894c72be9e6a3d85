"""What torch says about its devices, and about the memory of a training."""

import warnings
from collections.abc import Callable

import torch
from torch import cuda

from keras_mp.backends.devices import Device, parse_capability

# Where torch has one kernel for all gradients, and one for an update by Adam.
HAVE_KERNELS = ("cpu", "cuda")


def list_devices() -> list[Device]:
    # A CUDA build of torch on a machine with a broken driver warns and says
    # that there is no GPU. That is a failure, not an answer.
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
    # ROCm answers in the name of CUDA, with capabilities of AMD's own counting: (9, 4)
    # there is not a Hopper GPU.
    if torch.version.hip:
        return Device("rocm", name)
    return Device("cuda", name, parse_capability(cuda.get_device_capability(index)))


def measure_memory() -> Callable[[], int | None]:
    """The peak of all NVIDIA and AMD GPUs; torch counts that of no other device."""
    devices = range(cuda.device_count() if cuda.is_available() else 0)
    before = sum(cuda.memory_allocated(device) for device in devices)
    for device in devices:
        cuda.reset_peak_memory_stats(device)
    return lambda: (
        sum(cuda.max_memory_allocated(device) for device in devices) - before
        if devices
        else None
    )
