"""The optimizer wrapper: decides of a step, and calls the inner optimizer or not."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import keras
from keras import ops

from keras_mp.backends import engine
from keras_mp.loss_scaling.explicit_scaling import ExplicitScaling
from keras_mp.loss_scaling.gradient_check import check_gradients
from keras_mp.loss_scaling.gradients import divided, narrowed, stay_finite, to_look_at
from keras_mp.loss_scaling.inner_optimizer import (
    checked_inner,
    ever_accumulates,
    hold,
    refuse_inner_arguments,
    start_averages,
    written_by,
)
from keras_mp.loss_scaling.rule import LossScaleRule
from keras_mp.loss_scaling.skip_watch import SkipWatch
from keras_mp.loss_scaling.stage import in_train_step

# The object that stands for "not given": dynamic=False wants a scale of the user's.
_DEFAULT_INITIAL_SCALE = LossScaleRule.initial_scale


@keras.saving.register_keras_serializable(package="keras_mp")
class LossScaleOptimizer(ExplicitScaling):
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
        self.max_consecutive_skips = max_consecutive_skips
        self._remember(rule, skip_watch)
        hold(self, inner_optimizer)

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
        self._remember_counts(len(variables))

    # Applying --------------------------------------------------------------------

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
        eager = not (tracing or keras.src.backend.in_stateless_scope())
        finite, after = self._decide(codes, variables, eager)
        applied = engine.update_if(
            finite,
            update,
            grads,
            written=functools.partial(written_by, self.inner_optimizer, variables),
            branches=accumulates,
        )
        if applied is False and self.skip_watch.state_before_skip is None:
            before = [ops.copy(v.value) for v in self.state_variables]
            self.skip_watch.state_before_skip = before
        for variable, value in after:
            variable.assign(value)
        # `fit` looks by itself, once it has put back what the step changed.
        if eager and not in_train_step() and not finite:
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


class _GradientsOf(list):
    """Gradients with their loss, for the way through Keras' `stateless_apply`."""

    def __init__(self, grads: Sequence[Any], loss: Any) -> None:
        super().__init__(grads)
        self.loss = loss
