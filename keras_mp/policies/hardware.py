"""Which policy the hardware is made for."""

from collections.abc import Iterable
from dataclasses import dataclass

import keras

from keras_mp.backends import engine
from keras_mp.backends.devices import Device

TENSOR_CORES = (7, 0)
"""The compute capability from which NVIDIA's GPUs have tensor cores."""


@dataclass(frozen=True)
class Recommendation:
    """A policy's name, and why this one.

    Args:
        name: `"mixed_float16"`, `"mixed_bfloat16"` or `"float32"`.
        reason: One sentence that names the hardware that decided.
        devices: The devices that were found; empty when asking failed.
    """

    name: str
    reason: str
    devices: tuple[Device, ...] = ()


def recommended_policy() -> Recommendation:
    """Says which policy suits the hardware that Keras' backend can see, and why.

    This is what the policy `"auto"` resolves to. It never raises: if the
    devices cannot be listed (a broken driver, a missing framework) it
    recommends `"float32"`, which runs everywhere, and gives the failure as
    the reason.

    On JAX it starts the JAX backend. A program of several processes calls
    `keras.distribution.initialize()` first, as before any other use of JAX.

    Returns:
        A `Recommendation` with `name`, `reason` and `devices`.

    Example:

    >>> recommendation = keras_mp.recommended_policy()
    >>> keras_mp.set_global_policy(recommendation.name)
    >>> print(recommendation.reason)

    Source: [Train With Mixed Precision, NVIDIA](
    https://docs.nvidia.com/deeplearning/performance/mixed-precision-training/):
    tensor cores need compute capability 7.0 (Volta) or higher.
    """
    try:
        devices = engine.list_devices()
    # Drivers and plugins raise all kinds of errors, and none of them may stop a
    # program that only asked for advice.
    except Exception as failure:
        return Recommendation(
            name="float32",
            reason=(
                "The devices of the Keras backend "
                f"{keras.backend.backend()!r} could not be listed "
                f"({_one_line(failure)}), and float32 runs on all of them."
            ),
        )
    return recommend(devices)


def recommend(devices: Iterable[Device]) -> Recommendation:
    """Chooses the policy for these devices; the rule behind `recommended_policy`.

    - a TPU: `"mixed_bfloat16"`;
    - NVIDIA GPUs that all have compute capability 7.0 or higher:
      `"mixed_float16"`;
    - anything else (older GPUs, GPUs of other makers, CPUs): `"float32"`.

    Args:
        devices: The devices of the machine. CPUs beside an accelerator do not
            count.

    Returns:
        A `Recommendation`.

    Example:

    >>> recommend([Device("cuda", "Tesla V100", (7, 0))]).name
    'mixed_float16'
    """
    devices = tuple(devices)

    def because(name: str, reason: str) -> Recommendation:
        return Recommendation(name, reason, devices)

    for device in devices:
        if device.kind == "tpu":
            return because(
                "mixed_bfloat16", f"{device.name} is a TPU, made for bfloat16."
            )

    gpus = [device for device in devices if device.kind != "cpu"]
    if not gpus:
        return because(
            "float32",
            "There is no GPU or TPU here, and on a CPU float16 is slower than float32 "
            "and bfloat16 faster for some models only.",
        )

    for gpu in gpus:
        if gpu.kind != "cuda" or gpu.compute_capability is None:
            return because(
                "float32",
                f"{gpu.name} ({_KINDS.get(gpu.kind, gpu.kind)}) does not "
                "report an NVIDIA compute capability, so its speed in float16 is "
                "unknown.",
            )

    lowest = min(gpus, key=_capability)
    found = (
        f"{lowest.name} has compute capability {_dotted(_capability(lowest))}"
        f"{', the lowest of the GPUs here,' if len(gpus) > 1 else ''}"
    )
    needed = f"which need {_dotted(TENSOR_CORES)} or higher"
    if _capability(lowest) >= TENSOR_CORES:
        return because("mixed_float16", f"{found} and has tensor cores, {needed}.")
    return because("float32", f"{found} and lacks tensor cores, {needed}.")


_KINDS = {
    "rocm": "an AMD GPU under ROCm",
    "metal": "an Apple GPU under Metal",
    "gpu": "a GPU of unknown make",
}


def _capability(gpu: Device) -> tuple[int, int]:
    return gpu.compute_capability or (0, 0)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _one_line(failure: Exception) -> str:
    message = " ".join(str(failure).split()).rstrip(".")
    kind = type(failure).__name__
    return f"{kind}: {message}" if message else kind
