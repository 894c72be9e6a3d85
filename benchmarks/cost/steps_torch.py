"""Training steps on torch: a model of Keras under the Adam of Keras and of torch."""

from typing import Any

import keras
import numpy as np
import torch
from keras import ops

import keras_mp
from benchmarks.cost.cases import Problem
from benchmarks.cost.peers import (
    EPSILON,
    LEARNING_RATE,
    SCALE,
    keras_optimizer,
    moments_of,
)


class TorchStep:
    """An eager step, whatever `jit` says."""

    def __init__(self, problem: Problem, jit: bool) -> None:
        self._model, self._loss = problem.model, problem.loss
        ones = np.ones(len(problem.x), "float32")
        self._batches = [
            [ops.convert_to_tensor(v) for v in (problem.x, problem.y, w)]
            for w in (ones, ones * np.inf)
        ]
        self._variables = self._model.trainable_variables
        self.initial()

    def run(self, steps: int, nonfinite: bool = False) -> None:
        x, y, weights = self._batches[nonfinite]
        for _ in range(steps):
            self._model.zero_grad()
            loss = torch.mean(weights * self._loss(y, self._model(x, training=True)))
            self.update(loss)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def weights(self) -> list[np.ndarray]:
        return [ops.convert_to_numpy(v).copy() for v in self._variables]

    def initial(self) -> None:
        """Makes the optimizer."""
        raise NotImplementedError

    def update(self, loss: Any) -> None:
        """The backward pass and the update."""
        raise NotImplementedError


class KerasAdam(TorchStep):
    """The Adam of Keras, without loss scaling."""

    wrapper: Any = None

    def initial(self) -> None:
        self._adam, self._optimizer = keras_optimizer(self.wrapper, self._model)

    def update(self, loss: Any) -> None:
        self._optimizer.scale_loss(loss).backward()
        grads = [v.value.grad for v in self._variables]
        with torch.no_grad():
            self.apply(grads, loss)

    def apply(self, grads: Any, loss: Any) -> None:
        self._optimizer.apply(grads, self._variables)

    def moments(self) -> list[np.ndarray]:
        return [ops.convert_to_numpy(v).copy() for v in moments_of(self._adam)]


class KerasOwn(KerasAdam):
    """Keras' LossScaleOptimizer."""

    wrapper = keras.optimizers.LossScaleOptimizer


class Ours(KerasAdam):
    """keras_mp's LossScaleOptimizer."""

    wrapper = keras_mp.LossScaleOptimizer

    def apply(self, grads: Any, loss: Any) -> None:
        self._optimizer.apply(grads, self._variables, loss=loss)


class TorchAdam(TorchStep):
    """`torch.optim.Adam`, without loss scaling."""

    def initial(self) -> None:
        self._adam = torch.optim.Adam(
            [v.value for v in self._variables], lr=LEARNING_RATE, eps=EPSILON
        )

    def update(self, loss: Any) -> None:
        loss.backward()
        self._adam.step()

    def moments(self) -> list[np.ndarray]:
        states = [self._adam.state[v.value] for v in self._variables]
        return [
            state[name].detach().cpu().numpy().copy()
            for name in ("exp_avg", "exp_avg_sq")
            for state in states
        ]


class TorchAmp(TorchAdam):
    """`torch.amp.GradScaler`, as in torch's AMP recipe."""

    def initial(self) -> None:
        super().initial()
        device = self._variables[0].value.device.type
        self._scaler = torch.amp.GradScaler(device, init_scale=SCALE)

    def update(self, loss: Any) -> None:
        self._scaler.scale(loss).backward()
        self._scaler.step(self._adam)
        self._scaler.update()


UNSCALED = {"keras": KerasAdam, "torch": TorchAdam}
SCALED = {"keras_mp": Ours, "keras": KerasOwn, "torch.amp": TorchAmp}
