"""What JAX says about gradients, devices, and the memory of a training."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax import lax

from keras_mp.backends.devices import Device, parse_capability
from keras_mp.backends.jax import programs
from keras_mp.backends.measures import Measures
from keras_mp.types import Tensor


def differentiate(
    function: Callable, arguments: Any, variables: Any, state: Any, compiled: bool
) -> tuple[Any, list, list, list]:
    try:
        from jax.extend.core import get_opaque_trace_state  # Keras does not import it.
    except ImportError:  # JAX 0.8 and older have it here.
        from jax.core import get_opaque_trace_state

    ids = {id(v) for v in variables}
    others = [v for v in state if id(v) not in ids]

    def run(weights: list, zeros: list | None, values: list, arguments: Any) -> Any:
        seen: list[Any] = []
        trace = get_opaque_trace_state()

        def see(x: Tensor) -> tuple[Any, bool]:
            # A tensor inside a loop must not leave it.
            here = get_opaque_trace_state() == trace and isinstance(x, jax.Array)
            if not (here and jax.numpy.issubdtype(x.dtype, jax.numpy.floating)):
                return x, False
            # The gradient by the zeros is the gradient by the sum.
            seen.append(x if zeros is None else x + zeros[len(seen)])
            return seen[-1], True

        mapping = zip([*variables, *others], [*weights, *values], strict=True)
        with keras.StatelessScope(list(mapping), collect_losses=True):
            loss = function(arguments, see)
        return loss, (loss, seen)

    weights, values = [v.value for v in variables], [v.value for v in others]
    _, (_, shapes) = jax.eval_shape(run, weights, None, values, arguments)
    zeros = [jax.numpy.zeros(s.shape, s.dtype) for s in shapes]
    gradient = jax.grad(run, argnums=(0, 1), has_aux=True)
    (by_variable, by_seen), (loss, seen) = (
        jax.jit(gradient) if compiled else gradient
    )(weights, zeros, values, arguments)
    return loss, seen, by_seen, by_variable


@jax.jit
def sums_of_bits(value: jax.Array) -> jax.Array:
    integers = jnp.dtype(f"uint{8 * value.dtype.itemsize}")
    bits = lax.bitcast_convert_type(value, integers)
    return bits.sum(range(value.ndim - 1) or None, dtype=jnp.uint32)


def list_devices() -> list[Device]:
    """The devices of all processes, which must all choose the same policy."""
    return [_device(device) for device in jax.devices()]


def _device(device: Any) -> Device:
    name, platform = str(device.device_kind), str(device.platform).lower()
    if platform not in ("gpu", "cuda"):
        return Device(platform, name)
    # JAX calls an AMD GPU "gpu" too. The client's version text and the capability tell
    # them apart: "gfx942" on AMD, "9.0" on NVIDIA.
    version = str(getattr(device.client, "platform_version", "")).lower()
    capability = getattr(device, "compute_capability", None)
    if "rocm" in version or str(capability).startswith("gfx"):
        return Device("rocm", name)
    numbers = parse_capability(capability)
    return Device("gpu" if numbers is None else "cuda", name, numbers)


def measure_memory() -> Callable[[], int | None]:
    """What the compiled train step needs on each device, as JAX's compiler planned.

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


class JaxMeasures(Measures):
    """Its attributes are those of `Measures`."""

    scope = staticmethod(programs.scope)
    traced = staticmethod(programs.traced)
    differentiate = staticmethod(differentiate)
    sums_of_bits = staticmethod(sums_of_bits)
    list_devices = staticmethod(list_devices)
    measure_memory = staticmethod(measure_memory)
    why_no_memory = "JAX has compiled no `train_step` whose memory it could report"
