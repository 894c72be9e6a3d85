"""What the optimizer wrapper remembers from step to step, and decides by."""

import sys
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_mp.backends import engine
from keras_mp.backends.codes import FINITE
from keras_mp.loss_scaling import checkpoint
from keras_mp.loss_scaling.nonfinite import ROWS, NonfiniteGradient, counted, report
from keras_mp.loss_scaling.rule import LossScaleRule, LossScaleState
from keras_mp.loss_scaling.skip_watch import SkipWatch


class ScalingState(keras.optimizers.LossScaleOptimizer):
    """Keras' wrapper with the variables of a `LossScaleState`, and counts by variable.

    It decides of a step, moves them by the rule, reports on them, and reads and writes
    checkpoints.
    """

    def _remember(self, rule: LossScaleRule, skip_watch: SkipWatch) -> None:
        """Creates the state; after Keras' own `__init__`, which tracks variables."""
        self.rule = rule
        self.skip_watch = skip_watch
        self._inner_follows = True
        # Created here, not in `build`: a compiled function that reads the scale before
        # the optimizer is built would otherwise keep its first value for ever. Order
        # and first two names as in Keras' wrapper, whose checkpoints we read.
        start = rule.initial_state()
        self.step_counter = self._own_variable(start.finite_steps, "step_counter")
        self.dynamic_scale = self._own_variable(start.scale, "dynamic_scale")
        self.skip_counter = self._own_variable(start.skipped_steps, "skipped_steps")
        self.consecutive_skip_counter = self._own_variable(
            start.consecutive_skips, "consecutive_skips"
        )
        self.broken_counter = self._own_variable(start.broken_steps, "broken_steps")

    def _remember_counts(self, number: int) -> None:
        """Creates the counts of `nonfinite_report`, for so many variables."""
        self.nonfinite_counts = self._own_variable(
            np.zeros((ROWS, number), "int32"), "nonfinite_counts"
        )

    def _own_variable(self, value: Any, name: str) -> keras.Variable:
        # autocast=False: under a float16 autocast scope a scale above 65504 would be
        # read as infinity.
        with keras.name_scope(self.name):
            variable = keras.Variable(
                value,
                dtype="float32" if isinstance(value, float) else "int",
                trainable=False,
                autocast=False,
                aggregation="only_first_replica",
                name=name,
            )
        self._track_variable(variable)
        return variable

    @property
    def state_variables(self) -> tuple[keras.Variable, ...]:
        """The variables of a `LossScaleState`, in its order."""
        return (
            self.dynamic_scale,
            self.step_counter,
            self.skip_counter,
            self.consecutive_skip_counter,
            self.broken_counter,
        )

    @property
    def loss_scale(self) -> Any:
        """The current loss scale, a float32 scalar."""
        return ops.copy(self.dynamic_scale.value)

    @property
    def skipped_steps(self) -> Any:
        """How many steps were skipped so far, an integer scalar."""
        return ops.copy(self.skip_counter.value)

    @property
    def consecutive_skips(self) -> Any:
        """How many steps were skipped since the last finite one, an integer scalar."""
        return ops.copy(self.consecutive_skip_counter.value)

    @property
    def last_step_finite(self) -> Any:
        """Was the last step applied? A bool scalar, True before the first step."""
        return ops.equal(self.consecutive_skip_counter.value, 0)

    @property
    def optimizers(self) -> list[Any]:
        """Those within a `MultiOptimizer`; an AttributeError within any other.

        Keras' callbacks for learning rates ask for it, and set each one's rate.
        """
        return self.inner_optimizer.optimizers

    def raise_if_diverged(
        self, optimizer_variables: Sequence[Any] | None = None
    ) -> None:
        """Looks at the skipped steps: warns, or raises, of what the scale cannot mend.

        Warns once of broken steps, whose loss was not finite or whose gradients were
        not at the lowest scale. Reads the device, so it waits for the steps under way.
        `fit` and eager `apply` call it by themselves.

        Args:
            optimizer_variables: in a stateless loop, the values of
                `optimizer.variables`, in their order.

        Raises:
            TrainingDivergedError: after `max_consecutive_skips` skips in a row.
        """
        if not self.built:
            return
        if optimizer_variables is None:
            optimizer_variables = [v.value for v in self.variables]
        values = dict(zip(map(id, self.variables), optimizer_variables, strict=True))
        self.skip_watch.look(
            LossScaleState(*(values[id(v)] for v in self.state_variables)),
            values[id(self.inner_optimizer._iterations)],
            values[id(self.nonfinite_counts)],
            self._trainable_variables,
        )

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Ends a `fit`: as Keras does, and looks at the last skips."""
        if sys.exc_info()[0] is not None:  # An exception under way comes first.
            super().finalize_variable_values(var_list)
            return
        # Before the first applied step the averages of `use_ema` average nothing.
        if int(ops.copy(self.inner_optimizer._iterations.value)):
            super().finalize_variable_values(var_list)
        self.raise_if_diverged()

    def nonfinite_report(self) -> list[NonfiniteGradient]:
        """Which variables had gradients that were not finite, most often first.

        Returns:
            One `NonfiniteGradient(path, count, first_step, kind)` for each such
            variable: in how many steps, in which first (counted from 1, skipped ones
            included), and whether "inf" or "nan" was among them ("inf, nan" for both).

        Raises:
            ValueError: if the optimizer is not built.
        """
        if not self.built:
            raise ValueError(
                "`nonfinite_report` needs a built optimizer. Received: one that has "
                "neither been built nor applied."
            )
        return report(self.nonfinite_counts, self._trainable_variables)

    def state_after_broken_step(self, values: Sequence[Any]) -> LossScaleState:
        """What `state_variables` come to if the loss of a step was not finite."""
        return self.rule.next(LossScaleState(*values), False, False)

    def _decide(
        self, codes: Any, variables: Sequence[Any], eager: bool
    ) -> tuple[Any, list[tuple[keras.Variable, Any]]]:
        """Whether a step with these codes is applied, and our own variables after it.

        The last code is its loss'.
        """
        state = LossScaleState(*(v.value for v in self.state_variables))
        finite = engine.all_finite(codes[:-1]) if eager else None
        if finite:  # Known eagerly, and then there is nothing to count.
            _, after, _ = _decision(self.rule, state, finite, codes[-1:], None, None)
            return True, list(zip(self.state_variables, after, strict=True))
        indices = [self._get_variable_index(v) for v in variables]
        if indices != list(range(len(self._trainable_variables))):
            # Only some of the variables, or in another order.
            columns = ops.one_hot(indices, len(self._trainable_variables), dtype="int8")
            known = ops.max(codes[: len(indices), np.newaxis] * columns, axis=0)
            codes = ops.concatenate([known, codes[len(indices) :]])
        applied = self.inner_optimizer._iterations.value
        finite, after, counts = _decision(
            self.rule, state, finite, codes, self.nonfinite_counts.value, applied
        )
        own = *self.state_variables, self.nonfinite_counts
        return finite, list(zip(own, (*after, counts), strict=True))

    # Saving ----------------------------------------------------------------------

    def save_own_variables(self, store: Any) -> None:
        """Writes Keras' own layout, with the counters it does not have by name."""
        self._inner_follows = True
        checkpoint.save(self, store)

    def load_own_variables(self, store: Any) -> None:
        """Reads what ours, Keras' wrapper, or the inner optimizer alone has saved.

        Raises:
            ValueError: if that is damaged. Nothing is changed then.
        """
        self._inner_follows = False
        self._inner_follows = checkpoint.load(self, store)
        skips, broken = self.skip_counter.value, self.broken_counter.value
        self.skip_watch.resume(int(ops.copy(skips)), int(ops.copy(broken)))

    def __dir__(self) -> list[str]:
        # Keras' saving goes on to what dir() names. After a refused checkpoint it must
        # not: it would load the inner optimizer, of which it writes a second copy.
        hidden = [] if self._inner_follows else ["inner_optimizer"]
        return [name for name in super().__dir__() if name not in hidden]


@engine.compiled(
    lambda rule, state, finite, codes, counts, applied: (
        keras.KerasTensor((), "bool", name="finite"), state, counts
    ),
    static=(0,),
)  # fmt: skip
def _decision(
    rule: LossScaleRule,
    state: LossScaleState,
    finite: Any,
    codes: Any,
    counts: Any,
    applied: Any,
) -> tuple[Any, LossScaleState, Any]:
    """Whether a step is finite, and the state and counts after it.

    All in one, of which XLA makes one kernel on CPUs. `finite` and `counts` may be
    None: not known yet, and not asked for.
    """
    if finite is None:
        finite = engine.all_finite(codes[:-1])
    if counts is not None:
        counts = counted(counts, codes, applied, state.skipped_steps)
    after = rule.next(state, finite, ops.equal(codes[-1], FINITE))
    return finite, after, counts
