"""Training steps on TensorFlow: a model of Keras under the Adam of Keras."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_mp
from benchmarks.cost.cases import Problem
from benchmarks.cost.peers import keras_optimizer, moments_of


class KerasAdam:
    """Keras' Adam without loss scaling: a `tf.function`, with XLA or without."""

    wrapper: Any = None

    def __init__(self, problem: Problem, jit: bool) -> None:
        self._model, self._loss = problem.model, problem.loss
        ones = np.ones(len(problem.x), "float32")
        self._batches = [
            [tf.constant(v) for v in (problem.x, problem.y, w)]
            for w in (ones, ones * np.inf)
        ]
        self._adam, self._optimizer = keras_optimizer(self.wrapper, self._model)
        self._step = tf.function(self.update, jit_compile=jit)

    def run(self, steps: int, nonfinite: bool = False) -> None:
        batch = self._batches[nonfinite]
        loss = None
        for _ in range(steps):
            loss = self._step(*batch)
        if loss is not None:
            # Each step needs the one before: when the last is done, all are.
            loss.numpy()
            self._model.trainable_variables[-1].numpy()

    def weights(self) -> list[np.ndarray]:
        return [v.numpy() for v in self._model.trainable_variables]

    def moments(self) -> list[np.ndarray]:
        return [v.numpy() for v in moments_of(self._adam)]

    def update(self, x: Any, y: Any, weights: Any) -> Any:
        """One step; returns the loss, unscaled."""
        variables = self._model.trainable_variables
        with tf.GradientTape() as tape:
            y_pred = self._model(x, training=True)
            loss = tf.reduce_mean(weights * self._loss(y, y_pred))
            scaled = self._optimizer.scale_loss(loss)
        self.apply(tape.gradient(scaled, variables), variables, loss)
        return loss

    def apply(self, grads: Any, variables: Any, loss: Any) -> None:
        self._optimizer.apply(grads, variables)


class KerasOwn(KerasAdam):
    """Keras' LossScaleOptimizer."""

    wrapper = keras.optimizers.LossScaleOptimizer


class Ours(KerasAdam):
    """keras_mp's LossScaleOptimizer."""

    wrapper = keras_mp.LossScaleOptimizer

    def apply(self, grads: Any, variables: Any, loss: Any) -> None:
        self._optimizer.apply(grads, variables, loss=loss)


UNSCALED = {"keras": KerasAdam}
SCALED = {"keras_mp": Ours, "keras": KerasOwn}
