"""What one optimizer remembers about loss scaling.

The optimizer holds one object: the variables of a `LossScaleState`, counts of the
gradients that were not finite, and the watches, which live in Python.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_mp.loss_scaling.nonfinite import ROWS
from keras_mp.loss_scaling.schedule import LossScaleRule, LossScaleState
from keras_mp.loss_scaling.skip_watch import SkipWatch
from keras_mp.loss_scaling.stage import GradientStage
from keras_mp.loss_scaling.underflow import UnderflowWatch


class LossScaling:
    """The state of loss scaling of one optimizer.

    Args:
        rule: how the loss scale moves.
        max_consecutive_skips: see `SkipWatch`.
        retake_steps: in this many first steps `fit` repeats a skipped step; None for
            always.
        parts: the optimizers that write, one or several.
        add_variable: (initial value, name) -> a variable of the optimizer.

    Attributes:
        scale, finite_steps, skipped_steps, consecutive_skips, broken_steps: variables,
            as in `LossScaleState`.
        variables: these five, in the order of `LossScaleState`.
        nonfinite_counts: a variable, see `nonfinite.py`; None before `build`.
        applied: whether this train step has updated anything, where that is known.
        before_skip: on torch, the values of the state before the first skipped update
            of this train step; else None.
        retakes: whether `fit` may still be among its first `retake_steps`.
        one_update: whether the last train step that Python saw makes this optimizer's
            update and has no other known effect, so that it may be repeated.
        batches: how many batches were taken so far, as far as `retake_steps` counts
            them; None if Python has to ask.
        steps_to_measure: whether `fit` has taken steps since it last asked for results.
        handled: the id of the exception in whose `except` block `fit` was called; that
            of None if there is none.
    """

    def __init__(
        self,
        rule: LossScaleRule,
        max_consecutive_skips: int | None,
        retake_steps: int | None,
        parts: list[Any],
        add_variable: Callable[[Any, str], keras.Variable],
    ) -> None:
        self.rule = rule
        self.parts = parts
        self.stage = GradientStage()
        lowest = rule.min_scale if rule.dynamic else math.inf
        self.skips = SkipWatch(max_consecutive_skips, lowest)
        self.underflow = UnderflowWatch()
        self.applied = False
        self.before_skip: list[Any] | None = None
        self.retake_steps = retake_steps
        self.retakes = retake_steps != 0
        self.one_update = True
        self.batches: int | None = None
        self.handled = id(None)
        self.steps_to_measure = True
        self._add_variable = add_variable
        # Created here, not in `build`: a compiled function that reads the scale before
        # the optimizer is built would otherwise keep its first value for ever. Order
        # and first two names as in Keras' wrapper, whose checkpoints we read.
        start = rule.initial_state()
        self.finite_steps = add_variable(start.finite_steps, "step_counter")
        self.scale = add_variable(start.scale, "dynamic_scale")
        self.skipped_steps, self.consecutive_skips, self.broken_steps = (
            add_variable(getattr(start, name), name)
            for name in ("skipped_steps", "consecutive_skips", "broken_steps")
        )
        self.variables = LossScaleState(
            self.scale,
            self.finite_steps,
            self.skipped_steps,
            self.consecutive_skips,
            self.broken_steps,
        )
        self.nonfinite_counts: Any = None

    def build(self, number: int) -> None:
        """Creates the counts for this many variables."""
        counts = np.zeros((ROWS, number), "int32")
        self.nonfinite_counts = self._add_variable(counts, "nonfinite_counts")

    def begin_fit(self) -> None:
        """Forgets what others may have changed since the last `fit`."""
        self.batches, self.handled = None, id(sys.exception())

    def begin_step(self) -> None:
        """Forgets what the last train step did."""
        self.applied, self.before_skip = False, None

    def note(self, applied: bool | None) -> None:
        """Notes what became of an update; None if Python does not know.

        Keeps the values of the state before the first skipped update of a step.
        """
        self.applied = self.applied or applied is True
        if applied is False and self.before_skip is None:
            self.before_skip = [ops.copy(v.value) for v in self.variables]

    def resume(self) -> None:
        """Treats the skips in a checkpoint as already reported.

        The next steps may still be among the first `retake_steps`.
        """
        skipped, broken = self.skipped_steps.value, self.broken_steps.value
        self.skips.resume(int(ops.copy(skipped)), int(ops.copy(broken)))
        self.retakes, self.batches = self.retake_steps != 0, None

    def after_broken_step(self, values: Sequence[Any]) -> LossScaleState:
        """The state that follows these values if the loss of a step was not finite."""
        state = LossScaleState(*values)
        return state._replace(
            skipped_steps=state.skipped_steps + 1,
            consecutive_skips=state.consecutive_skips + 1,
            broken_steps=state.broken_steps + 1,
        )
