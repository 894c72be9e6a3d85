"""The time of a training step, without its compilation."""

import threading
import time

import keras
from keras import ops

# The time of fewer steps says nothing.
MIN_STEPS = 3


class Stopwatch(keras.callbacks.Callback):
    """Measures the seconds that a step takes in `fit`.

    The first call of the train function compiles it, and the last call of an epoch does
    so again if its batch is smaller. So the first of several epochs is left out, or
    these two calls of a single epoch. It waits for the device at the start and at the
    end of what it measures, and at no step between.
    """

    # Without it, Keras on JAX waits for the device at every step.
    async_safe = True

    def __init__(self) -> None:
        super().__init__()
        self._seconds, self._steps = 0.0, 0
        self._lock = threading.Lock()

    @property
    def seconds_per_step(self) -> float | None:
        """None after too few steps, or after one epoch of unknown length."""
        return self._seconds / self._steps if self._steps >= MIN_STEPS else None

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._only = self.params["epochs"] == 1
        self._starting_call = 2 if self._only else 1 if epoch else None
        self._calls = self._first = self._ended = 0
        self._began: float | None = None

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self._calls += 1
        if self._calls == self._starting_call:
            self._wait()
            self._first, self._began = batch, time.perf_counter()
        elif self._only and self.params["steps"]:
            if batch + self.model.steps_per_execution >= self.params["steps"]:
                self._stop(batch)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        # On JAX and torch several threads call it, all before the end of the epoch.
        with self._lock:
            self._ended = max(self._ended, batch + 1)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if not self._only:
            # The last call may have made fewer steps than the others.
            self._stop(min(self._ended, self.params["steps"] or self._ended))

    def _stop(self, end: int) -> None:
        if self._began is not None:
            self._wait()
            self._seconds += time.perf_counter() - self._began
            self._steps += end - self._first
            self._began = None

    def _wait(self) -> None:
        """Waits for the last step by reading a variable that it wrote."""
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()
        for variable in [*self.model.metrics_variables, *self.model.variables][:1]:
            ops.convert_to_numpy(variable)
