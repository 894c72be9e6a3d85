"""The suite `compiled`: whole train steps, compiled for a device that is not there."""

from collections.abc import Callable, Iterator

from benchmarks.compiled.cases import CASES
from benchmarks.compiled.compiled_tables import (
    BACKENDS,
    BY_HAND,
    RECOMPUTED,
    WAYS,
    tables,
)
from benchmarks.compiled.devices import DEVICES
from benchmarks.origin import origin
from benchmarks.results import Record
from benchmarks.suites import Suite

_PACKAGES = ["jax", "optax", "keras-hub", "jax-cuda12-plugin", "libtpu"]


def measure(
    case: str,
    backend: str,
    way: str,
    progress: Callable[[float], object] = lambda part: None,
    ready: Callable[[], object] = lambda: None,
) -> Iterator[Record]:
    """Compiles a step and reads it.

    Args:
        case: device and model, "H100: MLP".
        backend: "jax" or "tensorflow", whose steps JAX compiles.
        way: one of `WAYS`.
        progress, ready: see `Suite.measure`.

    Yields:
        A record with the least seconds and the peak of memory in bytes.
    """
    ready()
    from benchmarks.compiled.steps import read_step  # It needs JAX.

    name, _, model = case.partition(": ")
    yield {
        **origin(_PACKAGES),
        "device": name,
        **read_step(CASES[model], DEVICES[name], way),
    }


_ALL = {
    f"{device}: {name}": case
    for device in DEVICES
    for name, case in CASES.items()
    if device in case.devices
}


def _configurations() -> Iterator[dict[str, str]]:
    for name, case in _ALL.items():
        device, _, _ = name.partition(":")
        for backend in BACKENDS:
            if case.is_compiled(device, backend):
                whole = case.depth and backend == "jax"
                for way in WAYS:
                    if whole or way not in (RECOMPUTED, BY_HAND):
                        yield {"case": name, "backend": backend, "way": way}


SUITE = Suite(
    "compiled",
    list(_configurations()),
    measure,
    tables,
    # Without the plugin of its device, or its package, no step can be compiled.
    slow=[
        name
        for name, case in _ALL.items()
        if not (DEVICES[name.partition(":")[0]].is_possible and case.is_possible)
    ],
    in_short=[
        "H100: decoder",
        "H100: ViT",
        "H100: ResNet-50",
        "TPU v5e: small decoder",
    ],
    environment=lambda about: {
        **DEVICES[about["case"].partition(":")[0]].environment,
        "KERAS_BACKEND": about["backend"],
    },
)
