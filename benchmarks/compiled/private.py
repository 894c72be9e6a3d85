"""The private names that the suite uses: JAX's compiler, and who is asked for a GPU."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import keras
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax._src.interpreters.mlir import make_ir_context
from jax._src.lib import xla_client
from jaxlib.mlir import ir

from benchmarks.compiled.devices import Device


@contextlib.contextmanager
def as_if_there(device: Device, sharding: Any) -> Iterator[None]:
    """Makes who asks see the device when they trace, instead of this process' own.

    Keras and JAX choose fused attention by it. TensorFlow's XLA does not say what it
    compiles for, so there keras_mp asks, too.
    """
    (there,) = sharding.device_set
    fake = mock.Mock(platform=device.platform, device_kind=there.device_kind)
    fake.compute_capability = "9.0"
    patches: list[Any] = [
        mock.patch.object(jax, "devices", lambda *args, **kwargs: [fake]),
        mock.patch.object(jax, "default_backend", lambda: device.platform),
        mock.patch.object(cudnn, "check_cudnn_version", lambda: 90800),
        mock.patch.object(cudnn, "check_compute_capability", lambda version: True),
        mock.patch.object(
            cudnn, "is_cuda_compute_capability_equal", lambda version: version == "9.0"
        ),
    ]
    if device.platform == "gpu" and keras.backend.backend() == "tensorflow":
        patches += _of_tensorflow()
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def _of_tensorflow() -> list[Any]:
    import tensorflow as tf

    def with_gpu(real: Callable, gpu: Any) -> Callable:
        def devices(device_type: str | None = None) -> list[Any]:
            if device_type == "GPU":
                return [gpu]
            return [*real(device_type), *([] if device_type else [gpu])]

        return devices

    config = tf.config
    physical = config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    logical = config.LogicalDevice("/device:GPU:0", "GPU")
    details = {"device_name": "NVIDIA H100", "compute_capability": (9, 0)}
    seen = {
        "list_physical_devices": physical,
        "get_visible_devices": physical,
        "list_logical_devices": logical,
    }
    return [
        mock.patch.object(config.experimental, "get_device_details", lambda _: details),
        *(
            mock.patch.object(config, name, with_gpu(getattr(config, name), gpu))
            for name, gpu in seen.items()
        ),
    ]


def compiled(stablehlo: bytes, sharding: Any, options: dict[str, Any]) -> Any:
    """Compiles a program that another framework made, by the compiler of JAX.

    Args:
        stablehlo: the module, as bytecode.
        sharding: of the device.
        options: of XLA, by name.
    """
    (device,) = sharding.device_set
    asked = xla_client.CompileOptions()
    asked.num_replicas = asked.num_partitions = 1
    build = asked.executable_build_options
    build.num_replicas = build.num_partitions = 1
    build.device_assignment = xla_client.DeviceAssignment.create(np.array([[0]]))
    asked.env_option_overrides = list(options.items())
    with make_ir_context():
        module = ir.Module.parse(stablehlo)
        _without_copies(module)
        devices = xla_client.DeviceList((device,))
        return device.client.compile(module, devices, asked)


def _without_copies(module: Any) -> None:
    # TensorFlow marks what it copies by an operation that only its own XLA knows.
    copies = []

    def note(operation: Any) -> Any:
        if operation.name == "mhlo.copy":
            copies.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(note)
    for copy in copies:
        copy.results[0].replace_all_uses_with(copy.operands[0])
    for copy in copies:
        copy.operation.erase()
