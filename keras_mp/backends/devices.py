"""A device of this machine, as a framework describes it.

`engine.list_devices()` asks only the framework that Keras uses, and does not catch the
errors of a driver. The rule that chooses a policy for the devices is in
`keras_mp.policies.hardware`.
"""

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Device:
    """One device, as the framework describes it.

    Args:
        kind: `"cpu"`, `"cuda"` (an NVIDIA GPU), `"rocm"` (an AMD GPU),
            `"metal"` (an Apple GPU), `"tpu"`, or the framework's own word for
            something else; `"gpu"` if it does not say whose GPU it is.
        name: The model's name, such as `"NVIDIA H100 80GB HBM3"`.
        compute_capability: `(major, minor)` of an NVIDIA GPU, otherwise None.
    """

    kind: str
    name: str
    compute_capability: tuple[int, int] | None = None


def parse_capability(capability: Any) -> tuple[int, int] | None:
    """Reads `"9.0"` (JAX) and `(9, 0)` (TensorFlow, torch) as `(9, 0)`."""
    if isinstance(capability, str):
        numbers = re.fullmatch(r"(\d+)\.(\d+)", capability)
        capability = numbers.groups() if numbers else ()
    if isinstance(capability, (tuple, list)) and len(capability) == 2:
        return int(capability[0]), int(capability[1])
    return None
