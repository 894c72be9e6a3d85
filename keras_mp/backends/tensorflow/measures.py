"""What TensorFlow says about gradients, devices, and the memory of a training."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp.backends.devices import Device, parse_capability
from keras_mp.backends.measures import Measures
from keras_mp.backends.tensorflow import programs
from keras_mp.types import Tensor


def differentiate(
    function: Callable, arguments: Any, variables: Any, state: Any, compiled: bool
) -> tuple[Any, list, list, list]:
    seen: list[Any] = []

    def see(x: Tensor) -> tuple[Any, bool]:
        # A tensor of an inner graph must not leave it.
        here = tf.executing_eagerly() and isinstance(x, tf.Tensor)
        if not (here and x.dtype.is_floating):
            return x, False
        seen.append(x)
        return x, True

    with tf.GradientTape() as tape:
        loss = function(arguments, see)
    found = tape.gradient(loss, [*(v.value for v in variables), *seen])
    # Sparse gradients, of an Embedding, become dense.
    found = [None if g is None else tf.convert_to_tensor(g) for g in found]
    return loss, seen, found[len(variables) :], found[: len(variables)]


def sums_of_bits(value: tf.Tensor) -> tf.Tensor:
    value = tf.convert_to_tensor(value)
    bits = tf.bitcast(value, getattr(tf, f"int{8 * value.dtype.size}"))
    # A GPU sums no narrower integers.
    axes = range(len(value.shape) - 1) or None
    return tf.reduce_sum(tf.cast(bits, tf.int64), axes)


def list_devices() -> list[Device]:
    # Listing physical devices does not initialize the runtime. Once it is initialized,
    # memory growth and virtual devices can no longer be configured.
    return [
        _device(physical)
        for physical in tf.config.list_physical_devices()
        if physical.device_type != "TPU_SYSTEM"  # the host of the TPU cores
    ]


def _device(physical: Any) -> Device:
    kind = physical.device_type.lower()
    if kind != "gpu":
        return Device(kind, physical.name)
    details = tf.config.experimental.get_device_details(physical)
    name = details.get("device_name", physical.name)
    if tf.test.is_built_with_rocm():
        return Device("rocm", name)
    if "metal" in name.lower():
        return Device("metal", name)
    capability = parse_capability(details.get("compute_capability"))
    return Device("gpu" if capability is None else "cuda", name, capability)


def measure_memory() -> Callable[[], int | None]:
    """The peak of all GPUs; TensorFlow does not count other devices' memory."""
    count = len(tf.config.list_logical_devices("GPU"))
    names = [f"GPU:{index}" for index in range(count)]
    info = tf.config.experimental.get_memory_info
    before = sum(info(name)["current"] for name in names)
    for name in names:
        tf.config.experimental.reset_memory_stats(name)
    return lambda: sum(info(name)["peak"] for name in names) - before if names else None


class TensorFlowMeasures(Measures):
    """Its attributes are those of `Measures`."""

    scope = staticmethod(programs.scope)
    traced = staticmethod(programs.traced)
    differentiate = staticmethod(differentiate)
    sums_of_bits = staticmethod(sums_of_bits)
    list_devices = staticmethod(list_devices)
    measure_memory = staticmethod(measure_memory)
    why_no_memory = "TensorFlow only counts the memory of GPUs"
