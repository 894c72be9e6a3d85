"""The peers: released packages that scale losses, besides ours, and their steps."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np

from benchmarks import BACKENDS
from benchmarks.cost.cases import Problem

LEARNING_RATE = 1e-4
EPSILON = 1e-12
"""Adam's, next to nothing: Keras, optax and torch add it at different places."""
SCALE = 2.0**15
"""The first loss scale, the same for all."""


class Peer(NamedTuple):
    """A package that scales losses.

    Attributes:
        name: for `--peer` and the tables.
        package: the module to import.
        distribution: what to `pip install`.
        family: whose Adam it works with: "keras", "optax" or "torch". Its base is a
            step with the same Adam without loss scaling.
        backends: where it runs.
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


class Step(Protocol):
    """A training step with a state of its own."""

    def run(self, steps: int, nonfinite: bool = False) -> None:
        """Takes steps with the same batch, and waits only for the last one.

        Args:
            steps: how many.
            nonfinite: whether the loss, and so every gradient, is not finite.
        """

    def weights(self) -> list[np.ndarray]:
        """The trainable variables, in the order of the model."""

    def moments(self) -> list[np.ndarray]:
        """Adam's first moments, then its second ones, each in that order."""


class Steps(NamedTuple):
    """The steps of a backend, as `steps_<backend>.py` lists them.

    Attributes:
        unscaled: family -> the step without loss scaling.
        scaled: peer -> the step with it.
    """

    unscaled: dict[str, Callable[[Problem, bool], Step]]
    scaled: dict[str, Callable[[Problem, bool], Step]]


def steps_on(backend: str) -> Steps:
    """The steps of the backend that Keras runs on."""
    module = importlib.import_module(f"benchmarks.cost.steps_{backend}")
    return Steps(module.UNSCALED, module.SCALED)


def keras_optimizer(wrapper: Any, model: Any) -> tuple[Any, Any]:
    """Keras' Adam and its wrapper, built for a model; without a wrapper, Adam twice."""
    adam = keras.optimizers.Adam(LEARNING_RATE, epsilon=EPSILON)
    optimizer = adam if wrapper is None else wrapper(adam, initial_scale=SCALE)
    optimizer.build(model.trainable_variables)
    return adam, optimizer


def moments_of(adam: Any) -> list[Any]:
    """The first moments of Keras' Adam, then the second, in the order of its model."""
    return [
        variable
        for moment in ("momentum", "velocity")
        for variable in adam.variables
        if variable.name.endswith(f"_{moment}")
    ]
