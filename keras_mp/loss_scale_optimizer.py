"""The optimizer wrapper: holds the state, asks the rule, calls the inner optimizer."""

import dataclasses
import functools
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_mp import checkpoint
from keras_mp.backend import engine
from keras_mp.backend.codes import FINITE
from keras_mp.gradient_check import check_gradients
from keras_mp.gradient_stage import GradientStage, in_train_step
from keras_mp.incoming_gradients import divided, narrowed, stay_finite, to_look_at
from keras_mp.inner_optimizer import (
    checked_inner,
    ever_accumulates,
    hold,
    refuse_inner_arguments,
    start_averages,
    written_by,
)
from keras_mp.loss_scale import LossScaleRule, LossScaleState
from keras_mp.nonfinite import ROWS, NonfiniteGradient, counted, report
from keras_mp.skip_watch import SkipWatch
from keras_mp.underflow import UnderflowWatch

# The object that stands for "not given": dynamic=False wants a scale of the user's.
_DEFAULT_INITIAL_SCALE = LossScaleRule.initial_scale


@keras.saving.register_keras_serializable(package="keras_mp")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Scales the loss so that float16 gradients neither vanish nor overflow.

    The loss is multiplied by the scale before the backward pass, the gradients by its
    reciprocal, in float32, after it. A step whose gradients are not all finite is
    skipped; if the inner optimizer accumulates gradients, that micro-batch alone is
    lost, and the next ones fill its window. The scale follows `LossScaleRule`.

    In `fit` there is nothing to do: `compile` wraps the optimizer of a model that
    computes in float16. In a loop of your own:

    ```python
    opt = keras_mp.LossScaleOptimizer("adam")
    scaled = opt.scale_loss(loss)                # before the gradients are taken
    opt.apply(scaled_grads, variables)           # unscales, then applies or skips
    ```

    or, where the gradients themselves are wanted, `grads = opt.unscale(scaled_grads)`,
    anything you like with them, then `opt.apply_gradients(zip(grads, variables))`. On
    JAX: `stateless_scale_loss`, `stateless_unscale` and `stateless_apply`.

    Args:
        inner_optimizer: a Keras optimizer, its name ("adam") or its config.
        initial_scale: the scale of the first step.
        dynamic_growth_steps: finite steps in a row before the scale grows.
        dynamic: False keeps the scale at `initial_scale`, which must then be given;
            non-finite steps are skipped all the same.
        growth_factor: what the scale is multiplied by when it grows, above 1.
        backoff_factor: what it is multiplied by when it backs off, within (0, 1).
        min_scale: the scale never falls below this; at least 2**-126.
        max_scale: the scale never rises above this; at most 2**126.
        hysteresis: non-finite steps in a row before the scale backs off.
        max_consecutive_skips: raise `TrainingDivergedError` after so many skipped
            steps in a row; None never does. `fit` looks once in so many steps, or in a
            hundred, so that no step waits for the device; a row of twice as many never
            goes unseen. Compiled loops of your own call `raise_if_diverged`.
        name: name of the optimizer.

    Raises:
        ValueError: for an argument outside its range, for a wrapper round a wrapper,
            and for an inner optimizer that another wrapper holds.

    Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
    """

    def __init__(
        self,
        inner_optimizer: Any,
        initial_scale: float = _DEFAULT_INITIAL_SCALE,
        dynamic_growth_steps: int = 2000,
        *,
        dynamic: bool = True,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        hysteresis: int = 1,
        max_consecutive_skips: int | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_inner_arguments(kwargs)
        if dynamic is False and initial_scale is _DEFAULT_INITIAL_SCALE:
            raise ValueError(
                "`dynamic=False` needs an `initial_scale` to stay at. Received: "
                "dynamic=False without initial_scale. Give one, or set "
                "`loss_scale_factor` on the inner optimizer."
            )
        rule = LossScaleRule(
            initial_scale=initial_scale,
            dynamic_growth_steps=dynamic_growth_steps,
            dynamic=dynamic,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            min_scale=min_scale,
            max_scale=max_scale,
            hysteresis=hysteresis,
        )
        skip_watch = SkipWatch(max_consecutive_skips)
        inner_optimizer = checked_inner(inner_optimizer)

        super().__init__(inner_optimizer, initial_scale, dynamic_growth_steps, name)
        self.rule = rule
        self.max_consecutive_skips = max_consecutive_skips
        self.skip_watch = skip_watch
        self.underflow_watch = UnderflowWatch()
        self._inner_follows = True
        # The stage is Python's own: TensorFlow's tracking must not wrap it.
        self._stage = GradientStage()
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
        hold(self, inner_optimizer)

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

    # The state -------------------------------------------------------------------

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

    def _after(
        self, finite: Any, codes: Any, variables: Sequence[Any], counting: bool
    ) -> list[tuple[keras.Variable, Any]]:
        """What our own variables come to in a step with these codes."""
        state = LossScaleState(*(v.value for v in self.state_variables))
        if not counting:
            after, _ = _state_and_counts(self.rule, state, finite, codes[-1:])
            return list(zip(self.state_variables, after, strict=True))
        indices = [self._get_variable_index(v) for v in variables]
        if indices != list(range(len(self._trainable_variables))):
            # Only some of the variables, or in another order.
            columns = ops.one_hot(indices, len(self._trainable_variables), dtype="int8")
            known = ops.max(codes[: len(indices), np.newaxis] * columns, axis=0)
            codes = ops.concatenate([known, codes[-1:]])
        applied = self.inner_optimizer._iterations.value
        after, counts = _state_and_counts(
            self.rule, state, finite, codes, self.nonfinite_counts.value, applied
        )
        own = *self.state_variables, self.nonfinite_counts
        return list(zip(own, (*after, counts), strict=True))

    # Building --------------------------------------------------------------------

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the inner optimizer's variables; does nothing the second time."""
        if self.built:
            return
        variables = list(variables)
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(variables)
        else:
            self.inner_optimizer._check_variables_are_known(variables)
        with engine.outside_trace():
            start_averages(self.inner_optimizer)
        # Keras' wrapper would create its state once more: go to the base class.
        keras.optimizers.Optimizer.build(self, variables)
        self.nonfinite_counts = self._own_variable(
            np.zeros((ROWS, len(variables)), "int32"), "nonfinite_counts"
        )

    # Explicit use ----------------------------------------------------------------

    def scale_loss(self, loss: Any) -> Any:
        """Multiplies a loss by the loss scale, in float32.

        Args:
            loss: float tensor of any shape, or a callable that returns one.

        Returns:
            The scaled loss, float32 (float64 stays), same shape; a callable for a
            callable.

        Raises:
            ValueError: inside a function that JAX traces, where the present scale
                would become a constant: use `stateless_scale_loss`.
        """
        if callable(loss):
            return lambda: self.scale_loss(loss())
        engine.refuse_baking("scale_loss", "stateless_scale_loss")
        self._stage.scaled(engine.is_tracing())
        return _multiply_wide(loss, self.dynamic_scale.value)

    def unscale(self, grads: Iterable[Any]) -> list[Any]:
        """Multiplies gradients by the reciprocal of the scale, in float32.

        Args:
            grads: gradients of a scaled loss; None and sparse ones are allowed.

        Returns:
            A list of float32 gradients (float64 stays); None stays None, sparse stays
            sparse. What is not finite is nan, so that no clipping can hide it.

        Raises:
            ValueError: if the gradients of this step were unscaled already.
        """
        engine.refuse_baking("unscale", "stateless_unscale")
        return self._unscale(self.dynamic_scale.value, grads)

    def _unscale(self, scale: Any, grads: Iterable[Any]) -> list[Any]:
        self._stage.unscaled(engine.is_tracing())
        grads = list(grads)
        known = len(grads) == len(self._trainable_variables)
        variables = self._trainable_variables if known else [None] * len(grads)
        self.underflow_watch.look(grads, variables)
        return engine.poison(divided(grads, variables, scale))

    def get_scaled_loss(self, loss: Any) -> Any:
        """`scale_loss` under its tf.keras name."""
        return self.scale_loss(loss)

    def get_unscaled_gradients(self, grads: Iterable[Any]) -> list[Any]:
        """`unscale` under its tf.keras name."""
        return self.unscale(grads)

    def apply(
        self,
        grads: Sequence[Any],
        trainable_variables: Sequence[Any] | None = None,
        *,
        loss: Any = None,
    ) -> None:
        """Updates the variables, or skips the step if a gradient is not finite.

        Gradients are unscaled here, unless `unscale` did it; on torch those that are
        the `.grad` of their variable in place, as by torch's own GradScaler.

        Args:
            grads: gradients, one for each variable, None where there is none.
            trainable_variables: the variables; those the optimizer was built with if
                left out.
            loss: the loss as it was before it was scaled. Where it is not finite the
                scale is not to blame and stays. `fit` sees to this by itself.

        Raises:
            ValueError: if gradients and variables differ in number or shape, if all
                gradients are None, or inside a JAX trace.
            TrainingDivergedError: see `max_consecutive_skips`; where the step runs
                eagerly.
        """
        loss = getattr(grads, "loss", loss)
        grads = list(grads)
        if not grads:
            return
        engine.refuse_baking("apply", "stateless_apply")
        engine.check_strategy(self.variables, self.built)
        if trainable_variables is None and not self.built:
            raise ValueError(
                "`trainable_variables` must be given to an optimizer that is not "
                "built. Received: trainable_variables=None. Or call "
                "`optimizer.build(trainable_variables)` first."
            )
        if trainable_variables is None:
            trainable_variables = self._trainable_variables
        variables = list(trainable_variables)
        check_gradients(grads, variables)
        if self.built:
            self._check_variables_are_known(variables)
        else:
            with keras.name_scope(self.name):
                self.build(variables)
        tracing = engine.is_tracing()
        update = functools.partial(self._update, variables)
        if self._stage.take(tracing):
            self.underflow_watch.look(grads, variables)
            if stay_finite(variables, self.inner_optimizer, self.rule.min_scale):
                # Where they are written: TensorFlow's graphs reuse their memory there.
                update = functools.partial(self._update, variables, scaled=True)
            else:
                grads = divided(grads, variables, self.dynamic_scale.value)
        narrow = narrowed(grads, variables)
        accumulates = ever_accumulates(self.inner_optimizer)
        if accumulates:
            # Keras adds them to accumulators of that dtype, in branches of a `cond`,
            # where neither JAX nor TensorFlow adds float32 to float16.
            grads = narrow
        if loss is not None:
            loss = ops.convert_to_tensor(loss)
        found, norm = to_look_at(narrow, variables, self.inner_optimizer)
        codes = engine.nonfinite([*found, norm, loss])
        finite = engine.all_finite(codes[:-1])
        stateless = keras.src.backend.in_stateless_scope()
        # Eagerly it is known whether there is something to count.
        counting = tracing or stateless or not finite
        after = self._after(finite, codes, variables, counting)
        engine.update_if(
            finite,
            update,
            grads,
            written=functools.partial(written_by, self.inner_optimizer, variables),
            branches=accumulates,
        )
        for variable, value in after:
            variable.assign(value)
        # `fit` looks by itself, once it has put back what the step changed.
        told_by_fit = in_train_step() or stateless
        if not tracing and not told_by_fit and not finite:
            self.raise_if_diverged()

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> Any:
        """`apply` for (gradient, variable) pairs; returns `iterations` as tf.keras."""
        pairs = list(grads_and_vars)
        self.apply([g for g, _ in pairs], [v for _, v in pairs])
        return self.iterations

    def _update(
        self, variables: Sequence[Any], grads: Sequence[Any], scaled: bool = False
    ) -> None:
        if scaled:
            scale = self.dynamic_scale.value
            in_place = not keras.src.backend.in_stateless_scope()
            grads = divided(grads, variables, scale, in_place)
        self.inner_optimizer.apply(grads, variables)

    # Stateless use ---------------------------------------------------------------

    def stateless_scale_loss(
        self, optimizer_variables: Sequence[Any], loss: Any
    ) -> Any:
        """`scale_loss` by the scale within `optimizer_variables`.

        Args:
            optimizer_variables: values of `optimizer.variables`, in their order.
            loss: float tensor of any shape.
        """
        self._stage.scaled(engine.is_tracing())
        return _multiply_wide(
            loss, self._value_in(optimizer_variables, self.dynamic_scale)
        )

    def stateless_unscale(
        self, optimizer_variables: Sequence[Any], grads: Iterable[Any]
    ) -> list[Any]:
        """`unscale` by the scale within `optimizer_variables`.

        Args:
            optimizer_variables: values of `optimizer.variables`, in their order.
            grads: gradients of a scaled loss.
        """
        return self._unscale(
            self._value_in(optimizer_variables, self.dynamic_scale), grads
        )

    def stateless_apply(
        self,
        optimizer_variables: Sequence[Any],
        grads: Sequence[Any],
        trainable_variables: Sequence[Any],
        *,
        loss: Any = None,
    ) -> tuple[list[Any], list[Any]]:
        """`apply` without side effects; not on TensorFlow, as in Keras.

        Args:
            optimizer_variables: values of `optimizer.variables`, in their order.
            grads: gradients, one for each trainable variable.
            trainable_variables: values of the trainable variables.
            loss: as in `apply`.

        Returns:
            `(trainable_variables, optimizer_variables)` after the step.
        """
        # Not Keras' wrapper's, which puts a conditional round the whole update, but the
        # base class', which calls `apply(grads)`.
        return keras.optimizers.Optimizer.stateless_apply(
            self, optimizer_variables, _GradientsOf(grads, loss), trainable_variables
        )

    def stateless_undo_skipped(
        self, optimizer_variables: Sequence[Any], before: Any, after: Any
    ) -> Any:
        """What a step changed beside the weights, unless the step was skipped.

        ```python
        trainable, state = opt.stateless_apply(state, grads, trainable)
        non_trainable = opt.stateless_undo_skipped(state, non_trainable, updated)
        ```

        Args:
            optimizer_variables: as `stateless_apply` returned them.
            before: a structure of tensors from before the step: the statistics of
                normalisation, the state of metrics.
            after: the same structure from after it.

        Returns:
            `after` if the step was applied, `before`, bit for bit, if not.
        """
        skips = self._value_in(optimizer_variables, self.consecutive_skip_counter)
        applied = ops.equal(skips, 0)
        return keras.tree.map_structure(
            lambda old, new: ops.where(applied, new, old), before, after
        )

    def _value_in(self, optimizer_variables: Sequence[Any], variable: Any) -> Any:
        optimizer_variables = list(optimizer_variables)
        if len(optimizer_variables) != len(self.variables):
            raise ValueError(
                "`optimizer_variables` must hold one value for each of "
                f"`optimizer.variables`. Received: {len(optimizer_variables)} values "
                f"for {len(self.variables)} variables."
            )
        index = next(i for i, v in enumerate(self.variables) if v is variable)
        return optimizer_variables[index]

    # Saving ----------------------------------------------------------------------

    def get_config(self) -> dict[str, Any]:
        """Keras' four keys, and those of ours that differ from their default."""
        config = super().get_config()
        ours = {
            f.name: getattr(self.rule, f.name)
            for f in dataclasses.fields(self.rule)
            if f.name not in config and getattr(self.rule, f.name) != f.default
        }
        if self.max_consecutive_skips is not None:
            ours["max_consecutive_skips"] = self.max_consecutive_skips
        return {**config, **ours}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict | None = None
    ) -> "LossScaleOptimizer":
        """Creates the wrapper and its inner optimizer from `get_config`'s dict."""
        config = dict(config)
        inner = keras.saving.deserialize_keras_object(
            config.pop("inner_optimizer"), custom_objects=custom_objects
        )
        return cls(inner, **config)

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


@functools.partial(engine.compiled, static=(0,))
def _state_and_counts(
    rule: LossScaleRule,
    state: LossScaleState,
    finite: Any,
    codes: Any,
    counts: Any = None,
    applied: Any = None,
) -> tuple[LossScaleState, Any]:
    """The state, and the counts if given, after a step; the last code is the loss'."""
    if counts is not None:
        counts = counted(counts, codes, applied, state.skipped_steps)
    return rule.next(state, finite, ops.equal(codes[-1], FINITE)), counts


class _GradientsOf(list):
    """Gradients with their loss, for the way through Keras' `stateless_apply`."""

    def __init__(self, grads: Sequence[Any], loss: Any) -> None:
        super().__init__(grads)
        self.loss = loss


def _multiply_wide(loss: Any, scale: Any) -> Any:
    """loss * scale in float32: in float16 the product would overflow at once.

    A loss that is not finite may have gradients that are, a mean absolute error of
    infinity for one. Here they become nan, so that its step is skipped everywhere.
    """
    return _product(ops.convert_to_tensor(loss), ops.convert_to_tensor(scale))


@engine.compiled
def _product(loss: Any, scale: Any) -> Any:
    double = keras.backend.standardize_dtype(loss.dtype) == "float64"
    loss = ops.cast(loss, "float64" if double else "float32")
    # No select, of which LLVM would compile a loop for each case.
    zero_or_nan = ops.stop_gradient(loss - loss)
    return ops.multiply(loss, ops.cast(scale, loss.dtype) + zero_or_nan)
