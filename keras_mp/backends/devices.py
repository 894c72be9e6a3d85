"""What the frameworks say about the devices of this machine.

Only asks and reports: which policy follows from the answer is the rule in
`keras_mp.policies.hardware`. Every function here imports the framework that Keras is
using and no other, and lets whatever goes wrong in a driver go through.
"""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras


@dataclass(frozen=True)
class Device:
    """One device, as the framework describes it.

    Args:
        kind: `"cpu"`, `"cuda"` (an NVIDIA GPU), `"rocm"` (an AMD GPU),
            `"metal"` (an Apple GPU), `"tpu"`, or the framework's own word for
            something else; `"gpu"` where it does not say whose GPU it is.
        name: The model's name, such as `"NVIDIA H100 80GB HBM3"`.
        compute_capability: `(major, minor)` of an NVIDIA GPU, otherwise None.
    """

    kind: str
    name: str
    compute_capability: tuple[int, int] | None = None


def list_devices() -> tuple[Device, ...]:
    """Lists the devices that the Keras backend in use can see.

    Returns:
        A tuple of `Device`, in the framework's order.

    Raises:
        NotImplementedError: If Keras runs on a backend that is not one of
            JAX, TensorFlow and torch.
        Exception: Whatever the framework raises, when it is missing or its
            driver is broken.
    """
    backend = keras.backend.backend()
    if backend not in _PROBES:
        raise NotImplementedError(
            f"devices can be listed on the backends {', '.join(_PROBES)}. "
            f"Received: keras.backend.backend()={backend!r}"
        )
    return tuple(_PROBES[backend]())


def _jax_devices() -> list[Device]:
    import jax

    # Of all processes, not only of this one: every process of a distributed
    # run has to come to the same policy.
    return [
        Device(
            kind=(kind := _jax_kind(device)),
            name=str(device.device_kind),
            compute_capability=(
                _parse_capability(device.compute_capability) if kind == "cuda" else None
            ),
        )
        for device in jax.devices()
    ]


def _jax_kind(device: Any) -> str:
    platform = str(device.platform).lower()
    if platform not in ("gpu", "cuda"):
        return platform
    # JAX calls an AMD GPU "gpu" too. What tells them apart is the client's
    # version text and the capability, "gfx942" there and "9.0" on NVIDIA's.
    version = str(getattr(device.client, "platform_version", "")).lower()
    capability = getattr(device, "compute_capability", None)
    if "rocm" in version or str(capability).startswith("gfx"):
        return "rocm"
    return "gpu" if _parse_capability(capability) is None else "cuda"


def _tensorflow_devices() -> list[Device]:
    import tensorflow as tf

    # Physical devices and their details: unlike logical devices they are known
    # without initializing the runtime, after which memory growth and virtual
    # devices could no longer be configured.
    return [
        _tensorflow_device(tf, physical)
        for physical in tf.config.list_physical_devices()
        if physical.device_type != "TPU_SYSTEM"  # the host of the TPU cores
    ]


def _tensorflow_device(tf: Any, physical: Any) -> Device:
    kind = physical.device_type.lower()
    if kind != "gpu":
        return Device(kind, physical.name)
    details = tf.config.experimental.get_device_details(physical)
    name = details.get("device_name", physical.name)
    if tf.test.is_built_with_rocm():
        return Device("rocm", name)
    if "metal" in name.lower():
        return Device("metal", name)
    capability = _parse_capability(details.get("compute_capability"))
    return Device("gpu" if capability is None else "cuda", name, capability)


def _torch_devices() -> list[Device]:
    import torch

    # A CUDA build of torch on a machine with a broken driver warns and says
    # that there is no GPU. That is a failure, not an answer.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = torch.cuda.is_available()
    troubles = [w for w in caught if issubclass(w.category, UserWarning)]
    if troubles and not found:
        raise RuntimeError(str(troubles[0].message))

    cpu = Device("cpu", "cpu")
    if found:
        gpus = [
            # ROCm answers in the name of CUDA, with capabilities of AMD's own
            # counting: (9, 4) there is not a Hopper GPU.
            Device("rocm", torch.cuda.get_device_name(index))
            if torch.version.hip
            else Device(
                "cuda",
                torch.cuda.get_device_name(index),
                _parse_capability(torch.cuda.get_device_capability(index)),
            )
            for index in range(torch.cuda.device_count())
        ]
        return [cpu, *gpus]
    if torch.backends.mps.is_available():
        return [cpu, Device("metal", "Apple GPU (MPS)")]
    if torch.xpu.is_available():
        return [cpu, Device("xpu", torch.xpu.get_device_name(0))]
    return [cpu]


def _parse_capability(capability: Any) -> tuple[int, int] | None:
    """Reads `"9.0"` (JAX) and `(9, 0)` (TensorFlow, torch) as `(9, 0)`."""
    if isinstance(capability, (tuple, list)) and len(capability) == 2:
        return int(capability[0]), int(capability[1])
    if isinstance(capability, str):
        numbers = re.fullmatch(r"(\d+)\.(\d+)", capability)
        if numbers:
            return int(numbers[1]), int(numbers[2])
    return None


_PROBES: dict[str, Callable[[], list[Device]]] = {
    "jax": _jax_devices,
    "tensorflow": _tensorflow_devices,
    "torch": _torch_devices,
}
