"""The loss scale in the logs of `fit`, and a warning if it keeps falling."""

import threading
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp.backends.train_step import SCALE, UNDERFLOW, monitored
from keras_mp.loss_scaling.nonfinite import newest_step
from keras_mp.loss_scaling.optimizer import loss_scaling_of
from keras_mp.loss_scaling.schedule import check_whole_number
from keras_mp.messages import show_message, warn

# How often a scale falls without growing once before there is a warning.
FALLS = 12


class LossScaleMonitor(keras.callbacks.Callback):
    """Adds `loss_scale` and `skipped_steps` to the logs of each step and epoch.

    They are among the results of the train step, where every logger reads them: the
    progress bar, History, CSVLogger, TensorBoard, trackers, in any order. No step waits
    for them. Warns once if the scale keeps falling. At a skip after many steps without
    one, prints which variables' gradients were not finite. The model logs both in later
    calls of `fit`, too. An optimizer that does not scale the loss adds nothing.

    Args:
        quiet_steps: how many steps without a skip must pass before a skip is printed.
        underflow: whether to add `underflow`, the share of gradients that underflow:
            among the nonzero scaled gradients of float16 layers' variables, those below
            float16's smallest normal number, 2^-14, which lose bits. This reads every
            gradient once more.

    Raises:
        ValueError: if `quiet_steps` is not a whole number of at least 1.
        TypeError: if `underflow` is not a bool.
    """

    # On JAX Keras calls `on_train_batch_end` from several threads, during the training.
    async_safe = True
    _lock = threading.Lock()  # Shared by all monitors: a lock cannot be copied.

    def __init__(self, quiet_steps: int = 100, underflow: bool = False) -> None:
        super().__init__()
        check_whole_number("quiet_steps", quiet_steps)
        if not isinstance(underflow, bool):
            raise TypeError(f"`underflow` must be a bool. Received: {underflow=}.")
        self.quiet_steps = quiet_steps
        self.underflow = underflow
        self._scale, self._skipped, self._batch = 0.0, 0, -1
        self._falls = self._quiet = 0
        self._before: float | None = None  # The scale before a skip to print.
        self._warned = False

    def set_model(self, model: keras.Model) -> None:
        """Adds the loss scale to the results of the train step, which is rebuilt."""
        super().set_model(model)
        wanted = UNDERFLOW if self.underflow else SCALE
        if monitored.get(model) not in (wanted, UNDERFLOW):
            monitored[model] = wanted
            model.train_function = None

    def on_train_begin(self, logs: dict | None = None) -> None:
        optimizer = self.model.optimizer
        if hasattr(optimizer, "skipped_steps"):
            self._skipped = int(optimizer.skipped_steps)
            self._scale = float(optimizer.loss_scale)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._batch = -1

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if not logs or "loss_scale" not in logs:
            return
        with self._lock:
            # Steps may come out of order; an older one says nothing new.
            if batch > self._batch:
                scale, skipped = float(logs["loss_scale"]), int(logs["skipped_steps"])
                self._follow(batch, scale, skipped - self._skipped)

    def _follow(self, batch: int, scale: float, skips: int) -> None:
        if scale > self._scale:
            self._falls = 0
        elif scale < self._scale:
            self._falls += skips
        if skips:
            if self._before is None and self._quiet >= self.quiet_steps:
                self._before = self._scale
            self._quiet = 0
        else:
            self._quiet += batch - self._batch
        self._scale, self._skipped, self._batch = scale, self._skipped + skips, batch

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self._report()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self._report()

    def _report(self) -> None:
        """Prints and warns before the next step, in the thread of `fit`.

        There the state can be read, and a warning can name the line that called `fit`.
        """
        if self._falls >= FALLS and not self._warned:
            self._warned = True
            warn(
                f"The loss scale has fallen {self._falls} times without growing once, "
                f"to {self._scale:g}; {self._skipped} steps were skipped. "
                "keras_mp.diagnose(model, x, y) says which gradients overflow, and "
                "whether there is a scale that suits all."
            )
        before, self._before = self._before, None
        if before is None:
            return
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()
        optimizer = self.model.optimizer
        scaling: Any = loss_scaling_of(optimizer)
        variables = private.own_trainable(optimizer)
        step, what = newest_step(scaling.nonfinite_counts, variables)
        lower = f"{before:.10g} -> {self._scale:.10g}. Normal now and then."
        fallen = self._scale < before
        # By now nobody knows whether the step was applied when it was repeated.
        verb = "overflowed" if fallen and scaling.retakes else "skipped"
        # The progress bar of `fit` has not ended its line.
        bar = "\n" if self.params.get("verbose") == 1 else ""
        show_message(
            f"{bar}keras_mp: step {step} {verb} ({what}); loss scale "
            f"{lower if fallen else f'stays {before:.10g}.'}"
        )
