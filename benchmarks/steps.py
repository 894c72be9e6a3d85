"""A training step that can be timed, and the same unscaled step to hold it against."""

import importlib
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from benchmarks.cases import Problem

LEARNING_RATE = 1e-4
EPSILON = 1e-12
"""Of Adam: next to nothing, since Keras, optax and torch add it at different places."""
SCALE = 2.0**15
"""Of the loss, at first: the same for all."""


class Step(Protocol):
    """A training step with a state of its own."""

    def run(self, steps: int, poisoned: bool = False) -> None:
        """Takes steps with the same batch, and waits for the last one alone.

        Args:
            poisoned: whether the loss, and so every gradient, is not finite.
        """

    def weights(self) -> list[np.ndarray]:
        """The trainable variables, in the order of the model."""

    def moments(self) -> list[np.ndarray]:
        """Adam's first moments, then its second ones, each in that order."""


class Engine(NamedTuple):
    """What a backend has, as `steps_<backend>.py` lists it.

    Attributes:
        unscaled: family -> the step without loss scaling.
        scaled: peer -> the step with it.
    """

    unscaled: dict[str, Callable[[Problem, bool], Step]]
    scaled: dict[str, Callable[[Problem, bool], Step]]


def engine(backend: str) -> Engine:
    """The steps on a backend, which Keras must be running on."""
    module = importlib.import_module(f"benchmarks.steps_{backend}")
    return Engine(module.UNSCALED, module.SCALED)
