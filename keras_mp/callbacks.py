"""Callbacks that show what loss scaling does during `fit`."""

from typing import Any

import keras


class LossScaleMonitor(keras.callbacks.Callback):
    """Adds `loss_scale` and `skipped_steps` to the logs of each epoch.

    They end up where Keras' History, CSVLogger, TensorBoard and the progress bar of
    verbose=2 read them. Callbacks see the logs in their order: put this one first. An
    optimizer that does not scale adds nothing.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reads the two numbers once an epoch, so that no step waits for them."""
        optimizer = self.model.optimizer
        if logs is None or not hasattr(optimizer, "skipped_steps"):
            return
        logs["loss_scale"] = float(optimizer.loss_scale)
        logs["skipped_steps"] = int(optimizer.skipped_steps)
