"""What JAX says about its devices, and about the memory of a training."""

from collections.abc import Callable
from typing import Any

import jax

from keras_mp.backends.devices import Device, parse_capability


def list_devices() -> list[Device]:
    """The devices of all processes, which have to come to the same policy."""
    return [_device(device) for device in jax.devices()]


def _device(device: Any) -> Device:
    name, platform = str(device.device_kind), str(device.platform).lower()
    if platform not in ("gpu", "cuda"):
        return Device(platform, name)
    # JAX calls an AMD GPU "gpu" too. What tells them apart is the client's
    # version text and the capability, "gfx942" there and "9.0" on NVIDIA's.
    version = str(getattr(device.client, "platform_version", "")).lower()
    capability = getattr(device, "compute_capability", None)
    if "rocm" in version or str(capability).startswith("gfx"):
        return Device("rocm", name)
    numbers = parse_capability(capability)
    return Device("gpu" if numbers is None else "cuda", name, numbers)


def measure_memory() -> Callable[[], int | None]:
    """What the compiled train step needs on any device, as JAX' compiler planned it.

    The counters of the devices themselves are never reset.
    """
    client = jax.local_devices()[0].client
    before = client.live_executables()

    def read() -> int | None:
        sizes = [
            _planned(program.get_compiled_memory_stats())
            for program in client.live_executables()
            if all(program is not x for x in before)
            and program.hlo_modules()[0].name == "jit_train_step"
        ]
        return max(sizes, default=None)

    return read


def _planned(stats: Any) -> int:
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )
