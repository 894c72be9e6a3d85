"""Warns of skipped steps that no loss scale can mend; ends a diverged training.

It reads the device, which waits for running steps, so it does not look at every step.
"""

from typing import Any

from keras import ops

from keras_mp.errors import TrainingDivergedError
from keras_mp.loss_scaling.nonfinite import named, newest
from keras_mp.loss_scaling.schedule import LossScaleState
from keras_mp.messages import warn


class SkipWatch:
    """What one optimizer has reported about its skipped steps so far.

    Args:
        max_consecutive_skips: skipped steps in a row after which to raise, or None.
        lowest_scale: the loss scale that is never lowered.
    """

    def __init__(
        self, max_consecutive_skips: int | None, lowest_scale: float = 1.0
    ) -> None:
        self.max_consecutive_skips = max_consecutive_skips
        self._lowest_scale = lowest_scale
        # `fit` looks this rarely, so it never misses twice as many skips in a row.
        self._usual_interval = min(max_consecutive_skips or 100, 100)
        # The first look comes early: a model whose loss is never finite shows it then.
        self.interval = min(10, self._usual_interval)
        self._warned = False
        self.resume(skipped_steps=0, broken_steps=0)

    def resume(self, skipped_steps: int, broken_steps: int) -> None:
        """Treats these counts from a checkpoint as already reported."""
        self._reported_skips = skipped_steps
        self._reported_broken_steps = broken_steps

    def look(
        self, state: LossScaleState, iterations: Any, counts: Any, variables: Any
    ) -> None:
        """Warns once of broken steps; raises after too many skips in a row.

        Args:
            state: readable scalars.
            iterations: how many steps were applied.
            counts: see `nonfinite.py`, a column for each of `variables`.

        Raises:
            TrainingDivergedError: after `max_consecutive_skips` skips in a row. Skips
                that were already reported do not count again if training goes on.
        """
        self.interval = self._usual_interval
        # One value of each variable, even if every TensorFlow replica has its own.
        state = LossScaleState(*(ops.copy(value) for value in state))
        skips, total = int(state.consecutive_skips), int(state.skipped_steps)
        steps = int(ops.copy(iterations)) + total
        most = self.max_consecutive_skips
        diverged = most is not None and min(skips, total - self._reported_skips) >= most
        broken = int(state.broken_steps)
        if not diverged and (self._warned or broken <= self._reported_broken_steps):
            return
        self._warned = True
        scale = float(state.scale)
        where = f"at step {steps} (loss scale {scale:g}"
        infected = named(newest(counts, variables))
        names = f"; variables whose gradients were not finite last: {infected})"
        # Broken at a scale that could go lower: the loss itself was not finite, and all
        # variables are infected.
        is_loss = broken > 0 and scale > self._lowest_scale
        if diverged:
            self._reported_skips = total
            raise TrainingDivergedError(
                f"{skips} steps in a row had gradients that are not finite, {where}"
                f"{names}, and max_consecutive_skips={most}. "
                f"{_LOSS if is_loss else _GRADIENTS} {_DIAGNOSE}"
            )
        if is_loss:
            warn(
                f"{broken} of {steps} steps were skipped because the loss is not "
                f"finite, whatever the loss scale. Seen {where}). {_LOSS} {_DIAGNOSE}"
            )
        else:
            warn(
                f"{broken} of {total} skipped steps were broken whatever the loss "
                "scale: the loss itself was not finite, or gradients were not, at a "
                "scale that goes no lower. "
                f"Seen {where}{names}. {_GRADIENTS} {_DIAGNOSE}"
            )


_LOSS = "An activation overflows float16, or the data or the weights are not finite."
_GRADIENTS = (
    "Lower the learning rate, clip gradients, or keep more layers in float32; "
    "`optimizer.nonfinite_report()` lists all variables."
)
_DIAGNOSE = "Find the layer: print(keras_mp.diagnose(model, x, y))"
