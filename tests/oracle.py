"""Dynamic loss scaling in NumPy, to say what is right.

Written from the description of the rule and not from `keras_mp`: nothing here
imports the package or Keras, so that a mistake would have to be made twice.
The rule is that of Micikevicius et al. 2018, section 3.2, with the hysteresis of
NVIDIA Apex (`update_scale_hysteresis`). A step is broken, and its scale not to
blame, if the loss was not finite or the scale could not be lowered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np


@dataclasses.dataclass
class LossScaleOracle:
    """A loss scale that moves by one step at a time."""

    initial_scale: float = 2.0**15
    dynamic_growth_steps: int = 2000
    dynamic: bool = True
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    hysteresis: int = 1

    def __post_init__(self) -> None:
        self.scale = np.float32(self.initial_scale)
        self.finite_steps = 0
        self.skipped_steps = 0
        self.consecutive_skips = 0
        self.broken_steps = 0

    @property
    def last_step_finite(self) -> bool:
        return self.consecutive_skips == 0

    @property
    def state(self) -> tuple[np.float32, int, int, int, int]:
        return (
            self.scale,
            self.finite_steps,
            self.skipped_steps,
            self.consecutive_skips,
            self.broken_steps,
        )

    def step(self, finite: bool, loss_finite: bool = True) -> None:
        if finite:
            self._after_a_finite_step()
        else:
            self._after_a_skipped_step(loss_finite)

    def _after_a_finite_step(self) -> None:
        self.consecutive_skips = 0
        self.finite_steps += 1
        if self.finite_steps >= self.dynamic_growth_steps:
            self.finite_steps = 0
            self._move(self.growth_factor)

    def _after_a_skipped_step(self, loss_finite: bool) -> None:
        self.skipped_steps += 1
        self.consecutive_skips += 1
        floor = not self.dynamic or self.scale == np.float32(self.min_scale)
        if not loss_finite or floor:
            self.broken_steps += 1
            return
        self.finite_steps = 0
        if self.consecutive_skips >= self.hysteresis:
            self._move(self.backoff_factor)

    def _move(self, factor: float) -> None:
        if not self.dynamic:  # it counts as ever, and stays where it is
            return
        with np.errstate(over="ignore", under="ignore"):  # the bounds catch both
            moved = self.scale * np.float32(factor)
        low, high = np.float32(self.min_scale), np.float32(self.max_scale)
        self.scale = np.float32(min(max(moved, low), high))


class SGD:
    """Gradient descent with momentum, `v = momentum * v - lr * g; w = w + v`."""

    def __init__(self, learning_rate: float = 0.01, momentum: float = 0.0) -> None:
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.iterations = 0
        self.velocities: list[np.ndarray] | None = None

    def step(
        self, weights: Sequence[np.ndarray], gradients: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        self.iterations += 1
        before = self.velocities or [np.zeros_like(w) for w in weights]
        self.velocities = [
            self.momentum * v - self.learning_rate * g
            for v, g in zip(before, gradients, strict=True)
        ]
        return [w + v for w, v in zip(weights, self.velocities, strict=True)]


class Adam:
    """Kingma & Ba 2015, in the form that ends its section 2 (epsilon hat)."""

    def __init__(
        self,
        learning_rate: float = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
    ) -> None:
        self.learning_rate = learning_rate
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.iterations = 0
        self.moments: list[tuple[np.ndarray, np.ndarray]] | None = None

    def step(
        self, weights: Sequence[np.ndarray], gradients: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        self.iterations += 1
        before = self.moments or [(np.zeros_like(w), np.zeros_like(w)) for w in weights]
        self.moments = [
            (
                self.beta_1 * m + (1 - self.beta_1) * g,
                self.beta_2 * v + (1 - self.beta_2) * g**2,
            )
            for (m, v), g in zip(before, gradients, strict=True)
        ]
        rate = (
            self.learning_rate
            * (1 - self.beta_2**self.iterations) ** 0.5
            / (1 - self.beta_1**self.iterations)
        )
        return [
            w - rate * m / (np.sqrt(v) + self.epsilon)
            for w, (m, v) in zip(weights, self.moments, strict=True)
        ]


class Clipping:
    """An optimizer whose gradients are cut off at +-clipvalue."""

    def __init__(self, optimizer: SGD | Adam, clipvalue: float = np.inf) -> None:
        self.optimizer = optimizer
        self.clipvalue = clipvalue

    @property
    def iterations(self) -> int:
        return self.optimizer.iterations

    def step(
        self, weights: Sequence[np.ndarray], gradients: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        clipped = [np.clip(g, -self.clipvalue, self.clipvalue) for g in gradients]
        return self.optimizer.step(weights, clipped)


class Accumulating:
    """An optimizer that takes a step by the mean of every `steps` gradients."""

    def __init__(self, optimizer: SGD | Adam | Clipping, steps: int) -> None:
        self.optimizer = optimizer
        self.steps = steps
        self.held: list[Sequence[np.ndarray]] = []

    @property
    def iterations(self) -> int:
        return self.optimizer.iterations

    def step(
        self, weights: Sequence[np.ndarray], gradients: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        self.held.append(gradients)
        if len(self.held) < self.steps:
            return list(weights)
        means = [sum(grads) / self.steps for grads in zip(*self.held, strict=True)]
        self.held = []
        return self.optimizer.step(weights, means)


@dataclasses.dataclass
class ScaledTraining:
    """A loss scale, an optimizer and weights, fed with gradients of the scaled loss.

    Weights and slots are kept in `dtype`: float64 to say what is right, float32 to
    say how far rounding alone may lead away from it.
    """

    loss_scale: LossScaleOracle
    optimizer: SGD | Adam | Clipping | Accumulating
    weights: list[np.ndarray]
    dtype: type = np.float64

    def __post_init__(self) -> None:
        self.weights = [np.array(w, self.dtype) for w in self.weights]

    def step(
        self, scaled_gradients: Sequence[np.ndarray], loss_finite: bool = True
    ) -> bool:
        """Takes one step, or skips it. Returns whether the gradients were finite."""
        finite = all(bool(np.isfinite(g).all()) for g in scaled_gradients)
        if finite:
            scale = self.dtype(self.loss_scale.scale)  # the scale that scaled them
            gradients = [np.asarray(g, self.dtype) / scale for g in scaled_gradients]
            self.weights = self.optimizer.step(self.weights, gradients)
        self.loss_scale.step(finite, loss_finite)  # and only now does the scale move
        return finite

    def run(self, sequence: Iterable[Sequence[np.ndarray]]) -> list[np.ndarray]:
        """Takes all steps of `sequence`, and returns the weights after the last."""
        for scaled_gradients in sequence:
            self.step(scaled_gradients)
        return self.weights
