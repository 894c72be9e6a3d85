"""The private names of JAX that the suite uses: it asks them for the GPU's cuDNN."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from benchmarks.compiled.devices import Device


@contextlib.contextmanager
def as_if_there(device: Device, sharding: Any) -> Iterator[None]:
    """Makes Keras and JAX see the device when they trace, instead of this process' own.

    They choose fused attention by it. keras_mp does not ask.
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
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield
