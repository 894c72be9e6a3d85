"""The optimizer wrapper: scales the loss, and applies a step or skips it."""

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import keras
from keras import ops

import keras_mp.keras_private as private
from keras_mp import wanted
from keras_mp.backends import engine
from keras_mp.loss_scaling import checkpoint, gradients, nonfinite, step, unwrapped
from keras_mp.loss_scaling.inner_optimizer import (
    checked_inner,
    refuse_inner_arguments,
    start_averages,
)
from keras_mp.loss_scaling.schedule import (
    LossScaleRule,
    LossScaleState,
    check_whole_number,
)
from keras_mp.loss_scaling.stage import in_train_step, update_by
from keras_mp.loss_scaling.state import LossScaling
from keras_mp.policies import heads
from keras_mp.rounding.holders import hold
from keras_mp.rounding.optimizer import parts_of
from keras_mp.types import Gradients, Optimizer, Tensor, Variables

# The object that stands for "not given": dynamic=False needs a scale from the user, as
# Keras' own tests ask for an error without one.
_DEFAULT_INITIAL_SCALE = LossScaleRule.initial_scale
# The defaults of 0.1.0. A file leaves out arguments equal to these, as Keras' own tests
# count its keys, and is read with these: a later default changes no old file.
DEFAULTS_IN_FILES = {
    "initial_scale": 2.0**15,
    "dynamic_growth_steps": 2000,
    "dynamic": True,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "min_scale": 1.0,
    "max_scale": 2.0**24,
    "hysteresis": 1,
    "max_consecutive_skips": None,
    "retake_steps": 100,
}


@keras.saving.register_keras_serializable(package="keras_mp")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Scales the loss so that float16 gradients neither underflow nor overflow.

    The loss is multiplied by the scale before the backward pass, the gradients by its
    reciprocal, in float32, after it. A step whose gradients are not all finite is
    skipped; if the inner optimizer accumulates gradients, only that micro-batch is
    lost, and the next ones fill its window. The scale follows `LossScaleRule`.

    In `fit` there is nothing to do: `compile` wraps the optimizer of a model that
    computes in float16. In a loop of your own:

    ```python
    opt = keras_mp.LossScaleOptimizer("adam")
    scaled = opt.scale_loss(loss)                # before the gradients are taken
    opt.apply(scaled_grads, variables)           # unscales, then applies or skips
    ```

    If you need the gradients themselves, take `grads = opt.unscale(scaled_grads)`, do
    what you like with them, then call `opt.apply_gradients(zip(grads, variables))`. On
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
        max_consecutive_skips: raise `TrainingDivergedError` after this many skipped
            steps in a row; None never raises. `fit` looks once in this many steps, or
            in a hundred, so that steps need not wait for the device; it never misses
            twice as many. In compiled loops of your own call `raise_if_diverged`.
        retake_steps: in this many first steps, `fit` and `train_on_batch` repeat a
            skipped step with the same batch, at the lower scale, until it is applied:
            no batch is lost to the first scale. Each of these steps waits for the
            device, and `skipped_steps` counts each try. A step is not repeated if a
            second optimizer updates in it, if it calls Python from a TensorFlow graph,
            if its loss is not finite, or if the scale is the lowest. 0 for never, None
            for always.
        name: name of the optimizer.

    Raises:
        ValueError: for an argument outside its range, for a wrapper round a wrapper,
            and for an inner optimizer that another wrapper holds.

    Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
    """

    def __init__(
        self,
        inner_optimizer: str | keras.optimizers.Optimizer,
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
        retake_steps: int | None = 100,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_inner_arguments(kwargs)
        if isinstance(initial_scale, bool):
            raise ValueError(
                "`initial_scale` must be a number. Received: "
                f"initial_scale={initial_scale}. tf.keras has `dynamic` in this place: "
                f"pass dynamic={initial_scale} by its name, after the initial scale."
            )
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
        if max_consecutive_skips is not None:
            check_whole_number("max_consecutive_skips", max_consecutive_skips)
        if retake_steps is not None:
            check_whole_number("retake_steps", retake_steps, least=0)
        inner_optimizer = checked_inner(inner_optimizer)

        wanted.half_precision()
        super().__init__(
            inner_optimizer, initial_scale, dynamic_growth_steps, name=name
        )
        self.max_consecutive_skips = max_consecutive_skips
        self.retake_steps = retake_steps
        self._loss_scaling = LossScaling(
            rule,
            max_consecutive_skips,
            retake_steps,
            parts_of(inner_optimizer),
            self._add_own,
        )
        # Keras' wrapper uses these names.
        self.step_counter = self._loss_scaling.finite_steps
        self.dynamic_scale = self._loss_scaling.scale
        self._loads_inner = True
        hold(self, inner_optimizer)
        unwrapped.leave_alone(inner_optimizer)

    # Building --------------------------------------------------------------------

    def build(self, variables: Variables) -> None:
        """Creates the inner optimizer's variables; does nothing the second time."""
        if self.built:
            return
        variables = list(variables)
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(variables)
        else:
            private.check_known(self.inner_optimizer, variables)
        with engine.outside_trace():
            start_averages(self.inner_optimizer)
        # Keras' wrapper would create its state once more: go to the base class.
        keras.optimizers.Optimizer.build(self, variables)
        self._loss_scaling.build(len(variables))

    def _add_own(self, value: Any, name: str) -> keras.Variable:
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
        private.track(self, variable)
        return variable

    # Scaling and unscaling ---------------------------------------------------------

    def scale_loss(self, loss: Tensor) -> Any:
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
        return self._scale(loss, self.dynamic_scale.value)

    def unscale(self, grads: Iterable[Tensor]) -> list[Any]:
        """Multiplies gradients by the reciprocal of the scale, in float32.

        Args:
            grads: gradients of a scaled loss; None and sparse ones are allowed.

        Returns:
            A list of float32 gradients (float64 stays); None stays None, sparse stays
            sparse. Non-finite values become nan, so that no clipping can hide them.

        Raises:
            ValueError: if the gradients of this step were unscaled already.
        """
        engine.refuse_baking("unscale", "stateless_unscale")
        return self._unscale(grads, self.dynamic_scale.value)

    def get_scaled_loss(self, loss: Tensor) -> Any:
        """`scale_loss` under its tf.keras name."""
        return self.scale_loss(loss)

    def get_unscaled_gradients(self, grads: Iterable[Tensor]) -> list[Any]:
        """`unscale` under its tf.keras name."""
        return self.unscale(grads)

    def stateless_scale_loss(
        self, optimizer_variables: Sequence[Tensor], loss: Tensor
    ) -> Any:
        """`scale_loss` by the scale within `optimizer_variables`.

        Args:
            optimizer_variables: values of `optimizer.variables`, in their order.
            loss: float tensor of any shape.
        """
        scale = self._by_id(optimizer_variables)[id(self.dynamic_scale)]
        return self._scale(loss, scale)

    def stateless_unscale(
        self, optimizer_variables: Sequence[Tensor], grads: Iterable[Tensor]
    ) -> list[Any]:
        """`unscale` by the scale within `optimizer_variables`.

        Args:
            optimizer_variables: values of `optimizer.variables`, in their order.
            grads: gradients of a scaled loss.
        """
        scale = self._by_id(optimizer_variables)[id(self.dynamic_scale)]
        return self._unscale(grads, scale)

    def _scale(self, loss: Tensor, scale: Any) -> Any:
        self._loss_scaling.stage.scaled(engine.is_tracing())
        loss, scale = ops.convert_to_tensor(loss), ops.convert_to_tensor(scale)
        # In float16 the product would overflow at once.
        double = keras.backend.standardize_dtype(loss.dtype) == "float64"
        loss = ops.cast(loss, "float64" if double else "float32")
        # A loss that is not finite may have finite gradients, such as an infinite mean
        # absolute error. A scale of nan makes them nan: the step is skipped.
        value = ops.stop_gradient(loss)
        return ops.multiply(loss, ops.cast(scale, loss.dtype) + (value - value))

    def _unscale(self, grads: Iterable[Tensor], scale: Any) -> list[Any]:
        self._loss_scaling.stage.unscaled(engine.is_tracing())
        grads = list(grads)
        own = private.own_trainable(self)
        variables = own if len(grads) == len(own) else [None] * len(grads)
        self._loss_scaling.underflow.look(grads, variables)
        return engine.nonfinite_to_nan(gradients.unscaled(grads, variables, scale))

    # Applying --------------------------------------------------------------------

    def apply(
        self,
        grads: Gradients,
        trainable_variables: Sequence[Any] | None = None,
        *,
        loss: Tensor = None,
    ) -> None:
        """Updates the variables, or skips the step if a gradient is not finite.

        Gradients are unscaled here, unless `unscale` did it; on torch in place if they
        are the `.grad` of their variable, as torch's own GradScaler does.

        Args:
            grads: gradients, one for each variable, None where there is none.
            trainable_variables: the variables; by default those that the optimizer was
                built with.
            loss: the loss before it was scaled. If it is not finite, the scale is not
                to blame and stays. `fit` does this for you.

        Raises:
            ValueError: if gradients and variables differ in number or shape, if all
                gradients are None, or inside a JAX trace.
            TrainingDivergedError: see `max_consecutive_skips`; only if the step runs
                eagerly.
        """
        grads = list(grads)
        if not grads:
            return
        engine.refuse_baking("apply", "stateless_apply")
        engine.check_strategy(self.variables, self.built)
        variables = self._variables_for(grads, trainable_variables)
        scaling, inner = self._loss_scaling, self.inner_optimizer
        with update_by(self, scaled=True):
            prepared = step.prepare(scaling, inner, grads, variables, loss)
            decision = step.decide(scaling, self, prepared)
            step.write(scaling, inner, prepared, decision)
        # `fit` looks by itself, once it has put back what the step changed.
        if decision.finite is False and not in_train_step():
            self.raise_if_diverged()

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> Any:
        """`apply` for (gradient, variable) pairs; returns `iterations` as tf.keras."""
        pairs = list(grads_and_vars)
        self.apply([g for g, _ in pairs], [v for _, v in pairs])
        return self.iterations

    def _variables_for(
        self, grads: list[Tensor], trainable_variables: Sequence[Any] | None
    ) -> list[Any]:
        """The variables of these gradients, checked; builds the optimizer with them."""
        if trainable_variables is None:
            if not self.built:
                raise ValueError(
                    "`trainable_variables` must be given to an optimizer that is not "
                    "built. Received: trainable_variables=None. Or call "
                    "`optimizer.build(trainable_variables)` first."
                )
            trainable_variables = private.own_trainable(self)
        variables = list(trainable_variables)
        gradients.check(grads, variables)
        if self.built:
            private.check_known(self, variables)
        else:
            with keras.name_scope(self.name):
                self.build(variables)
        return variables

    def stateless_apply(
        self,
        optimizer_variables: Sequence[Tensor],
        grads: Gradients,
        trainable_variables: Sequence[Tensor],
        *,
        loss: Tensor = None,
    ) -> tuple[list[Any], list[Any]]:
        """`apply` without side effects; not on TensorFlow, as in Keras.

        Args:
            optimizer_variables: values of `optimizer.variables`, in their order.
            grads: gradients, one for each trainable variable.
            trainable_variables: values of the trainable variables.
            loss: as in `apply`.

        Returns:
            `(trainable_variables, optimizer_variables)` after the step.

        Raises:
            ValueError: as in `apply`; if the optimizer is not built; if there is not a
                value for each variable.
        """
        # Keras' wrapper puts a conditional round the whole update.
        if not self.built:
            raise ValueError(
                "`stateless_apply` needs an optimizer that is built. Call "
                "`optimizer.build(trainable_variables)` first."
            )
        self._by_id(optimizer_variables)  # Refuses a wrong number of them.
        own = private.own_trainable(self)
        if len(trainable_variables) != len(own):
            raise ValueError(
                "`trainable_variables` must hold one value for each variable that the "
                f"optimizer was built with. Received: {len(trainable_variables)} "
                f"values for {len(own)} variables."
            )
        values = *trainable_variables, *optimizer_variables
        pairs = zip([*own, *self.variables], values, strict=True)
        with keras.StatelessScope(list(pairs)) as scope:
            self.apply(grads, loss=loss)
        after = [scope.get_current_value(v) for v in [*own, *self.variables]]
        return after[: len(own)], after[len(own) :]

    def stateless_undo_skipped(
        self, optimizer_variables: Sequence[Tensor], before: Any, after: Any
    ) -> Any:
        """Undoes what a step changed besides the weights, if the step was skipped.

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
        counter = self._loss_scaling.consecutive_skips
        applied = ops.equal(self._by_id(optimizer_variables)[id(counter)], 0)
        return keras.tree.map_structure(
            lambda old, new: ops.where(applied, new, old), before, after
        )

    def _by_id(self, optimizer_variables: Sequence[Tensor]) -> dict[int, Any]:
        """The value of each variable of the optimizer, by the variable's id."""
        values = list(optimizer_variables)
        if len(values) != len(self.variables):
            raise ValueError(
                "`optimizer_variables` must hold one value for each of "
                f"`optimizer.variables`. Received: {len(values)} values "
                f"for {len(self.variables)} variables."
            )
        return dict(zip(map(id, self.variables), values, strict=True))

    # What came of it ---------------------------------------------------------------

    @property
    def loss_scale(self) -> Any:
        """The current loss scale, a float32 scalar."""
        return ops.copy(self.dynamic_scale.value)

    @property
    def skipped_steps(self) -> Any:
        """How many steps were skipped so far, an integer scalar."""
        return ops.copy(self._loss_scaling.skipped_steps.value)

    @property
    def consecutive_skips(self) -> Any:
        """How many steps were skipped since the last finite one, an integer scalar."""
        return ops.copy(self._loss_scaling.consecutive_skips.value)

    @property
    def last_step_finite(self) -> Any:
        """Was the last step applied? A bool scalar, True before the first step."""
        return ops.equal(self._loss_scaling.consecutive_skips.value, 0)

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers of an inner `MultiOptimizer`; else raises an AttributeError.

        Keras' learning rate callbacks ask for them, and set each one's rate.
        """
        return self.inner_optimizer.optimizers

    def nonfinite_report(self) -> list[nonfinite.NonfiniteGradient]:
        """Which variables had gradients that were not finite, most frequent first.

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
        counts = self._loss_scaling.nonfinite_counts
        return nonfinite.report(counts, private.own_trainable(self))

    def raise_if_diverged(
        self, optimizer_variables: Sequence[Any] | None = None
    ) -> None:
        """Looks at the skipped steps: warns, or raises, if no scale can help.

        Warns once of broken steps: their loss was not finite, or their gradients were
        not finite at the lowest scale. Reads the device, so it waits for running steps.
        Eager `apply` calls this for you, and so does `fit` for `model.optimizer`.

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
        values = self._by_id(optimizer_variables)
        scaling = self._loss_scaling
        scaling.skips.look(
            LossScaleState(*(values[id(v)] for v in scaling.variables)),
            values[id(private.applied_steps(self.inner_optimizer))],
            values[id(scaling.nonfinite_counts)],
            private.own_trainable(self),
        )

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Ends a `fit` as Keras does, and looks at the last skips."""
        if id(sys.exception()) != self._loss_scaling.handled:
            # An exception ends `fit`, and on JAX the variables may have no values.
            super().finalize_variable_values(var_list)
            return
        steps = private.applied_steps(self.inner_optimizer).value
        # Before the first applied step the averages of `use_ema` average nothing.
        if int(ops.copy(steps)):
            super().finalize_variable_values(var_list)
        self.raise_if_diverged()

    # Saving ----------------------------------------------------------------------

    def get_config(self) -> dict[str, Any]:
        """Keras' four keys, and those of ours that differ from their default."""
        config = super().get_config()
        ours = self._not_default().items()
        return {**config, **{k: value for k, value in ours if k not in config}}

    def _not_default(self) -> dict[str, Any]:
        """The arguments about loss scaling that differ from their default."""
        found = dataclasses.asdict(self._loss_scaling.rule)
        for name in ("max_consecutive_skips", "retake_steps"):
            found[name] = getattr(self, name)
        return {k: v for k, v in found.items() if v != DEFAULTS_IN_FILES[k]}

    def __repr__(self) -> str:
        # Only what Python knows: the scale itself is on the device.
        parts = [type(self.inner_optimizer).__name__]
        parts += [f"{name}={value!r}" for name, value in self._not_default().items()]
        return f"LossScaleOptimizer({', '.join(parts)})"

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict | None = None
    ) -> "LossScaleOptimizer":
        """Creates the wrapper and its inner optimizer from `get_config`'s dict."""
        # A fixed scale without an initial one still raises its error.
        old = {k: v for k, v in DEFAULTS_IN_FILES.items() if k != "initial_scale"}
        make = super().from_config
        return heads.from_file(
            {**old, **config}, lambda config: make(config, custom_objects)
        )

    def save_own_variables(self, store: Any) -> None:
        """Writes Keras' own layout, with the counters it does not have by name."""
        self._loads_inner = True
        checkpoint.save(self, self._loss_scaling, store)

    def load_own_variables(self, store: Any) -> None:
        """Reads what this wrapper, Keras' wrapper or a plain inner optimizer saved.

        Raises:
            ValueError: if it is damaged. Nothing is changed then.
        """
        self._loads_inner = False
        self._loads_inner = checkpoint.load(self, self._loss_scaling, store)
        self._loss_scaling.resume()

    def __dir__(self) -> list[str]:
        # Keras goes on to load what dir() names. After a refused checkpoint it must not
        # load the inner optimizer, of which it writes a second copy.
        hidden = [] if self._loads_inner else ["inner_optimizer"]
        return [name for name in super().__dir__() if name not in hidden]


def loss_scaling_of(optimizer: Optimizer | None) -> Any:
    """The `LossScaling` of an optimizer; None if it is not ours."""
    return getattr(optimizer, "_loss_scaling", None)
