"""Training steps as `fit` takes them, with the batch on the device from the start."""

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_mp.loss_scaling.optimizer import loss_scaling_of

# XLA; torch and XLA; cuBLAS and cuDNN.
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "ALLOC_FAILED")


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
        model._symbolic_build(data_batch=(x, y))
        model.make_train_function()
        self._step = model.train_function
        self._optimizer = model.optimizer
        parts = (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
        # Donated at the first step: the variables of the model hold nothing then.
        self._state = tuple([v.value for v in part] for part in parts)

    @property
    def resident_bytes(self) -> int:
        """What the state takes, whatever the batch."""
        return sum(x.nbytes for part in self._state for x in part)

    def run(self, steps: int) -> None:
        """Takes steps, and waits for the last one alone."""
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
        model._symbolic_build(data_batch=(x, y))
        model.make_train_function()
        self._model, self._step = model, model.train_function

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


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device had not enough memory; frameworks have classes of their own."""
    told = f"{type(error).__name__} {error}".lower()
    return any(words.lower() in told for words in OUT_OF_MEMORY)


def set_tf32(backend: str, allowed: bool) -> None:
    """Lets products and convolutions of float32 round to TF32, or not."""
    if backend == "jax":
        import jax

        precision = "tensorfloat32" if allowed else "highest"
        jax.config.update("jax_default_matmul_precision", precision)
    else:
        import torch

        torch.backends.cuda.matmul.allow_tf32 = allowed
        torch.backends.cudnn.allow_tf32 = allowed


def device_memory(backend: str) -> int | None:
    """Bytes that this process may have on its GPU; None without one."""
    if backend == "jax":
        import jax

        stats = jax.local_devices()[0].memory_stats() or {}
        return stats.get("bytes_limit")
    import torch

    if not torch.cuda.is_available():
        return None
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()


def has_gpu(backend: str) -> bool:
    """Whether the framework itself sees an NVIDIA GPU."""
    from keras_mp.backends import engine

    return any(device.kind == "cuda" for device in engine.list_devices())


def forget(backend: str) -> None:
    """Gives back what a training, of which nothing else is left, has taken."""
    import gc

    keras.utils.clear_session()
    gc.collect()
    if backend == "jax":
        import jax

        jax.clear_caches()
    else:
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()
