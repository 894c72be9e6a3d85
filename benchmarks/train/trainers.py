"""Training steps as in `fit`, with the batch on the device from the start."""

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_mp.keras_private import build_from_batch
from keras_mp.loss_scaling.optimizer import loss_scaling_of


def first_steps_of(optimizer: Any) -> int:
    """In this many first steps ours waits for the device, to repeat a skipped one."""
    return getattr(optimizer, "retake_steps", 0)


class JaxTrainer:
    """The compiled train function of a compiled model.

    Args:
        model: built and compiled.
        x, y: a batch.
    """

    def __init__(self, model: Any, x: np.ndarray, y: np.ndarray) -> None:
        import jax

        self._wait = jax.block_until_ready
        self._batches = itertools.repeat(jax.device_put((x, y)))
        build_from_batch(model, (x, y))
        model.make_train_function()
        self._step = model.train_function
        self._optimizer = model.optimizer
        self.first_steps = first_steps_of(model.optimizer)
        parts = (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
        # The first step donates it: from then on the model's variables are empty.
        self._state = tuple([v.value for v in part] for part in parts)

    @property
    def resident_bytes(self) -> int:
        """The bytes of the state, which do not depend on the batch."""
        return sum(x.nbytes for part in self._state for x in part)

    def run(self, steps: int) -> None:
        """Takes steps, and waits only for the last one."""
        for _ in range(steps):
            _, self._state = self._step(self._state, self._batches)
        self._wait(self._state)

    @property
    def skipped_steps(self) -> int | None:
        """None without a loss scale."""
        scaling = loss_scaling_of(self._optimizer)
        if scaling is None:
            return None
        values = zip(self._optimizer.variables, self._state[2], strict=True)
        return next(int(x) for v, x in values if v is scaling.skipped_steps)


class TorchTrainer:
    """The train function of a compiled model; see `JaxTrainer`."""

    def __init__(self, model: Any, x: np.ndarray, y: np.ndarray) -> None:
        self._data = [tuple(keras.ops.convert_to_tensor(part) for part in (x, y))]
        build_from_batch(model, (x, y))
        model.make_train_function()
        self._model, self._step = model, model.train_function
        self.first_steps = first_steps_of(model.optimizer)

    @property
    def resident_bytes(self) -> int:
        variables = [*self._model.variables, *self._model.optimizer.variables]
        return sum(v.value.numel() * v.value.element_size() for v in variables)

    def run(self, steps: int) -> None:
        import torch

        for _ in range(steps):
            self._step(self._data)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    @property
    def skipped_steps(self) -> int | None:
        skipped = getattr(self._model.optimizer, "skipped_steps", None)
        return None if skipped is None else int(skipped)


TRAINERS: dict[str, Callable[[Any, np.ndarray, np.ndarray], Any]] = {
    "jax": JaxTrainer,
    "torch": TorchTrainer,
}
