"""The most memory that a training has taken on its devices, where that is counted."""

from collections.abc import Callable
from typing import Any

import keras


def measure_memory() -> Callable[[], int | None]:
    """Begins to measure what a training takes; no other may go on beside it.

    Call it before the model is built.

    Returns:
        A function to call after the training: the peak in bytes, on all devices of
        this process, less what was taken before. On JAX it is what the compiled train
        step needs, on any device: arguments, results and temporaries. None where it is
        not counted: see `WHY_NOT_MEASURED`.
    """
    return _METERS[keras.backend.backend()]()


def _jax() -> Callable[[], int | None]:
    import jax

    client = jax.local_devices()[0].client
    # The counters of JAX's devices are never reset. Its compiler has planned the
    # memory of a program, and knows.
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


def _tensorflow() -> Callable[[], int | None]:
    import tensorflow as tf

    count = len(tf.config.list_logical_devices("GPU"))
    names = [f"GPU:{index}" for index in range(count)]
    info = tf.config.experimental.get_memory_info
    before = sum(info(name)["current"] for name in names)
    for name in names:
        tf.config.experimental.reset_memory_stats(name)
    return lambda: sum(info(name)["peak"] for name in names) - before if names else None


def _torch() -> Callable[[], int | None]:
    from torch import cuda

    devices = range(cuda.device_count() if cuda.is_available() else 0)
    before = sum(cuda.memory_allocated(device) for device in devices)
    for device in devices:
        cuda.reset_peak_memory_stats(device)
    return lambda: (
        sum(cuda.max_memory_allocated(device) for device in devices) - before
        if devices
        else None
    )


_METERS = {"jax": _jax, "tensorflow": _tensorflow, "torch": _torch}

WHY_NOT_MEASURED = {
    "jax": "JAX has compiled no `train_step`, whose memory it would know",
    "tensorflow": "TensorFlow counts the memory of GPUs alone",
    "torch": "torch counts the memory of NVIDIA's and AMD's GPUs alone",
}
