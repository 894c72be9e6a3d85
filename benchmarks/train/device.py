"""The device of a training: its peak, its memory, TF32."""

import gc
import pathlib
import shutil
from typing import NamedTuple

import keras

from keras_mp.backends import engine

# The messages of XLA; of torch and XLA; of cuBLAS and cuDNN.
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "ALLOC_FAILED")


class Peak(NamedTuple):
    """Operations a second with dense matrices, in units of 10^12.

    Attributes:
        float32: without TF32.
        tf32: None on a device without such tensor cores.
        half: float16 and bfloat16, with float32 sums.
    """

    float32: float
    tf32: float | None
    half: float


PEAKS = {
    "H100 PCIe": Peak(51.2, 378.0, 756.0),
    "H100 NVL": Peak(60.0, 417.5, 835.5),
    "H200 NVL": Peak(60.0, 417.5, 835.5),
    "H100": Peak(66.9, 494.7, 989.4),
    "H200": Peak(66.9, 494.7, 989.4),
    "A100": Peak(19.5, 156.0, 312.0),
    "A10": Peak(31.2, 62.5, 125.0),
    "L40S": Peak(91.6, 183.0, 362.0),
    "L4": Peak(30.3, 60.0, 121.0),
    "V100": Peak(15.7, None, 125.0),
    "T4": Peak(8.1, None, 65.0),
    "RTX 4090": Peak(82.6, 82.6, 165.2),
    "RTX 3090": Peak(35.6, 35.6, 71.0),
}
"""Part of the name -> peak; the first match counts. Source: NVIDIA's data sheets."""


def peak(device: str, precision: str) -> float | None:
    """The most operations a second; None for a device that is not in the table.

    Args:
        device: its name.
        precision: "float32", "tf32", "mixed_float16" or "mixed_bfloat16".
    """
    # Whole words: an A10 is not an A100, an L4 is not an L40S.
    words = f" {device.replace('-', ' ')} "
    for name, peak in PEAKS.items():
        if f" {name} " in words:
            known = {"float32": peak.float32, "tf32": peak.tf32}
            found = known.get(precision, peak.half)
            # The V100 and the T4 have no tensor cores for bfloat16.
            if precision == "mixed_bfloat16" and peak.tf32 is None:
                return None
            return None if found is None else found * 1e12
    return None


def is_nvidia_here() -> bool:
    """Whether the machine has an NVIDIA GPU.

    It asks no framework, which would take memory on the device.
    """
    driver = pathlib.Path("/proc/driver/nvidia/version").exists()
    return driver or shutil.which("nvidia-smi") is not None


def has_gpu() -> bool:
    """Whether the framework itself sees an NVIDIA GPU."""
    return any(device.kind == "cuda" for device in engine.list_devices())


def is_out_of_memory(error: Exception) -> bool:
    """Whether the device had too little memory; each framework has its own error."""
    text = f"{type(error).__name__} {error}".lower()
    return any(message.lower() in text for message in OUT_OF_MEMORY)


def set_tf32(backend: str, allowed: bool) -> None:
    """Allows or forbids TF32 in products and convolutions of float32."""
    if backend == "jax":
        import jax

        precision = "tensorfloat32" if allowed else "highest"
        jax.config.update("jax_default_matmul_precision", precision)
    else:
        import torch

        torch.backends.cuda.matmul.allow_tf32 = allowed
        torch.backends.cudnn.allow_tf32 = allowed


def device_memory(backend: str) -> int | None:
    """The bytes that this process may use on its GPU; None without one."""
    if backend == "jax":
        import jax

        stats = jax.local_devices()[0].memory_stats() or {}
        return stats.get("bytes_limit")
    import torch

    if not torch.cuda.is_available():
        return None
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()


def forget(backend: str) -> None:
    """Frees the memory of a training that nothing refers to any more."""
    keras.utils.clear_session()
    gc.collect()
    if backend == "jax":
        import jax

        jax.clear_caches()
    else:
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()
