"""Who else scales losses: the released packages that ours is measured beside."""

import importlib.util
from typing import NamedTuple

from benchmarks.cases import BACKENDS


class Peer(NamedTuple):
    """A way to scale losses.

    Attributes:
        name: what `--peer` and the tables call it.
        package: what must be importable.
        distribution: what `pip install` calls that.
        family: whose Adam it works with: "keras", "optax" or "torch". It is held
            against a step with the same Adam that does not scale.
        backends: where it can be measured.
    """

    name: str
    package: str
    distribution: str
    family: str
    backends: tuple[str, ...]

    @property
    def installed(self) -> bool:
        """Whether it can be imported, without importing it."""
        return importlib.util.find_spec(self.package) is not None


PEERS = (
    Peer("keras_mp", "keras_mp", "keras_mp", "keras", BACKENDS),
    Peer("keras", "keras", "keras", "keras", BACKENDS),
    Peer("optax", "optax", "optax", "optax", ("jax",)),
    Peer("flax", "flax", "flax", "optax", ("jax",)),
    Peer("jmp", "jmp", "jmp", "optax", ("jax",)),
    Peer("mpx", "mpx", "mixed-precision-for-jax", "optax", ("jax",)),
    Peer("torch.amp", "torch", "torch", "torch", ("torch",)),
)
