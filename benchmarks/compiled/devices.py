"""The devices that steps are compiled for, and what they can do at best."""

import importlib.util
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

_H100 = pathlib.Path(__file__).parents[2] / "tests" / "h100.txtpb"


class Device(NamedTuple):
    """A device that XLA compiles for.

    Attributes:
        name: in tables.
        platform: "gpu" or "tpu".
        plugin: the module that XLA needs for it.
        half: the policy that is made for it.
        bandwidth: of its memory, bytes a second.
        peak: of products, operations a second, by whether an operand is float32.
        environment: variables for the process.
    """

    name: str
    platform: str
    plugin: str
    half: str
    bandwidth: float
    peak: Mapping[bool, float]
    environment: Mapping[str, str]

    @property
    def is_possible(self) -> bool:
        """Is its plugin installed?"""
        return importlib.util.find_spec(self.plugin) is not None

    def sharding(self) -> Any:
        """The sharding of arrays on it."""
        import jax
        from jax.experimental import topologies

        if self.platform == "gpu":
            config = _H100.read_text(encoding="utf-8")
            topology = topologies.get_topology_desc(
                "H100", "cuda", topology="1x1x1", target_config=config
            )
        else:
            topology = topologies.get_topology_desc("v5e:2x2", "tpu")
        return jax.sharding.SingleDeviceSharding(topology.devices[0])


# From the data sheets: H100 SXM, dense, with TF32 for float32; TPU v5e.
DEVICES = {
    "H100": Device(
        "H100",
        "gpu",
        "jax_cuda12_plugin",
        "mixed_float16",
        3.35e12,
        {False: 989e12, True: 494e12},
        {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
    ),
    "TPU v5e": Device(
        "TPU v5e",
        "tpu",
        "libtpu",
        "mixed_bfloat16",
        819e9,
        {False: 197e12, True: 197e12},
        {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_STDERR_LOG_LEVEL": "3",
            "TPU_MIN_LOG_LEVEL": "3",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        },
    ),
}
