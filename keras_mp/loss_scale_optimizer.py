"""The optimizer wrapper: holds the state, asks the rule, calls the inner optimizer."""

import dataclasses
import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_mp.backend import engine
from keras_mp.errors import TrainingDivergedError
from keras_mp.gradient_stage import GradientStage
from keras_mp.loss_scale import LossScaleRule, LossScaleState, check_whole_number

# The object that stands for "not given": dynamic=False wants a scale of the user's.
_DEFAULT_INITIAL_SCALE = LossScaleRule.initial_scale
# Arguments of every Keras optimizer, which files of older Keras versions store for the
# wrapper too, at these values.
_INNER_ARGUMENTS = {
    "weight_decay": None,
    "clipnorm": None,
    "global_clipnorm": None,
    "clipvalue": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}
# Which wrapper holds an inner optimizer. Weak on both ends.
_holders: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@keras.saving.register_keras_serializable(package="keras_mp")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Scales the loss so that float16 gradients neither vanish nor overflow.

    The loss is multiplied by the scale before the backward pass, the gradients by its
    reciprocal, in float32, after it. A step whose gradients are not all finite is
    skipped. The scale follows `LossScaleRule`.

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
            steps in a row; None never does. `fit` looks once every so many steps, so
            that no step waits for the device; compiled loops of your own call
            `raise_if_diverged`.
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
        _refuse_inner_arguments(kwargs)
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
        inner_optimizer = _checked_inner(inner_optimizer)

        super().__init__(inner_optimizer, initial_scale, dynamic_growth_steps, name)
        self.rule = rule
        self.max_consecutive_skips = max_consecutive_skips
        # The stage is Python's own: TensorFlow's tracking must not wrap it.
        self._stage = GradientStage()
        # Created here, not in `build`: a compiled function that reads the scale before
        # the optimizer is built would otherwise keep its first value for ever. Order
        # and first two names as in Keras' wrapper, whose checkpoints we read.
        start = rule.initial_state()
        self.step_counter = self._own_variable(start.finite_steps, "step_counter")
        self.dynamic_scale = self._own_variable(start.scale, "dynamic_scale")
        self._skipped_steps = self._own_variable(start.skipped_steps, "skipped_steps")
        self._consecutive_skips = self._own_variable(
            start.consecutive_skips, "consecutive_skips"
        )
        _holders[inner_optimizer] = weakref.ref(self)

    def _own_variable(self, value: float, name: str) -> keras.Variable:
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
    def _state_variables(self) -> tuple[keras.Variable, ...]:
        return (
            self.dynamic_scale,
            self.step_counter,
            self._skipped_steps,
            self._consecutive_skips,
        )

    @property
    def loss_scale(self) -> Any:
        """The current loss scale, a float32 scalar."""
        return ops.copy(self.dynamic_scale.value)

    @property
    def skipped_steps(self) -> Any:
        """How many steps were skipped so far, an integer scalar."""
        return ops.copy(self._skipped_steps.value)

    @property
    def consecutive_skips(self) -> Any:
        """How many steps were skipped since the last finite one, an integer scalar."""
        return ops.copy(self._consecutive_skips.value)

    @property
    def last_step_finite(self) -> Any:
        """Was the last step applied? A bool scalar, True before the first step."""
        return ops.equal(self._consecutive_skips.value, 0)

    def raise_if_diverged(self) -> None:
        """Raises `TrainingDivergedError` after `max_consecutive_skips` skips in a row.

        Reads the device, so it waits for the steps under way. `fit` and eager `apply`
        call it by themselves.
        """
        if self.max_consecutive_skips is None:
            return
        skips = int(self.consecutive_skips)
        if skips >= self.max_consecutive_skips:
            raise TrainingDivergedError(
                f"{skips} steps in a row had gradients that are not finite "
                f"(max_consecutive_skips={self.max_consecutive_skips}); last good "
                f"step: {int(self.iterations)}, loss scale: {float(self.loss_scale)}. "
                "Look for inputs or a loss that are not finite, lower the learning "
                "rate, clip gradients, or keep more layers in float32."
            )

    def _advance(self, finite: Any) -> None:
        state = LossScaleState(*(v.value for v in self._state_variables))
        for variable, value in zip(
            self._state_variables, self.rule.next(state, finite), strict=True
        ):
            variable.assign(value)

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
        # Keras' wrapper would create its state once more: go to the base class.
        keras.optimizers.Optimizer.build(self, variables)

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
        return engine.poison(self._divided(grads, variables, scale))

    def get_scaled_loss(self, loss: Any) -> Any:
        """`scale_loss` under its tf.keras name."""
        return self.scale_loss(loss)

    def get_unscaled_gradients(self, grads: Iterable[Any]) -> list[Any]:
        """`unscale` under its tf.keras name."""
        return self.unscale(grads)

    def apply(
        self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None
    ) -> None:
        """Updates the variables, or skips the step if a gradient is not finite.

        Gradients are unscaled here, unless `unscale` did it.

        Args:
            grads: gradients, one for each variable, None where there is none.
            trainable_variables: the variables; those the optimizer was built with if
                left out.

        Raises:
            ValueError: if gradients and variables differ in number or shape, if all
                gradients are None, or inside a JAX trace.
            TrainingDivergedError: see `max_consecutive_skips`; where the step runs
                eagerly.
        """
        grads = list(grads)
        if not grads:
            return
        engine.refuse_baking("apply", "stateless_apply")
        variables = self._variables_for(grads, trainable_variables)
        if not self.built:
            with keras.name_scope(self.name):
                self.build(variables)
        tracing = engine.is_tracing()
        if self._stage.take(tracing):
            grads = self._divided(grads, variables, self.dynamic_scale.value)
        finite = engine.all_finite(grads)
        engine.update_if(
            finite, lambda grads: self.inner_optimizer.apply(grads, variables), grads
        )
        self._advance(finite)
        if not tracing and not keras.src.backend.in_stateless_scope():
            self.raise_if_diverged()

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> Any:
        """`apply` for (gradient, variable) pairs; returns `iterations` as tf.keras."""
        pairs = list(grads_and_vars)
        self.apply([g for g, _ in pairs], [v for _, v in pairs])
        return self.iterations

    def _divided(
        self, grads: Sequence[Any], variables: Sequence[Any], scale: Any
    ) -> list[Any]:
        # A variable that is overwritten with its "gradient" (float8 scales) gets a
        # value that no loss scale went into.
        overwritten = [self._overwrite_variable_with_gradient(v) for v in variables]
        unscaled = engine.unscale(
            [None if o else g for g, o in zip(grads, overwritten, strict=True)],
            ops.divide(1.0, scale),
        )
        return [
            g if o else u
            for g, o, u in zip(grads, overwritten, unscaled, strict=True)
        ]  # fmt: skip

    def _variables_for(
        self, grads: list[Any], trainable_variables: Sequence[Any] | None
    ) -> list[Any]:
        if trainable_variables is None and not self.built:
            raise ValueError(
                "`trainable_variables` must be given to an optimizer that is not "
                "built. Received: trainable_variables=None. Or call "
                "`optimizer.build(trainable_variables)` first."
            )
        variables = list(
            self._trainable_variables
            if trainable_variables is None
            else trainable_variables
        )
        if len(grads) != len(variables):
            raise ValueError(
                "`grads` must hold one gradient for each variable. Received: "
                f"{len(grads)} gradients for {len(variables)} variables."
            )
        if all(g is None for g in grads):
            raise ValueError(
                "No gradients provided for any variable: all of `grads` are None. "
                f"Received: grads of length {len(grads)}."
            )
        for grad, variable in zip(grads, variables, strict=True):
            if grad is not None and not _same_shape(grad.shape, variable.shape):
                raise ValueError(
                    "Each gradient must have the shape of its variable. Received: a "
                    f"gradient of shape {tuple(grad.shape)} for variable "
                    f"{getattr(variable, 'path', variable.name)} of shape "
                    f"{tuple(variable.shape)}."
                )
        return variables

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
        return _multiply_wide(loss, self._scale_in(optimizer_variables))

    def stateless_unscale(
        self, optimizer_variables: Sequence[Any], grads: Iterable[Any]
    ) -> list[Any]:
        """`unscale` by the scale within `optimizer_variables`.

        Args:
            optimizer_variables: values of `optimizer.variables`, in their order.
            grads: gradients of a scaled loss.
        """
        return self._unscale(self._scale_in(optimizer_variables), grads)

    def stateless_apply(
        self,
        optimizer_variables: Sequence[Any],
        grads: Sequence[Any],
        trainable_variables: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """`apply` without side effects; not on TensorFlow, as in Keras.

        Args:
            optimizer_variables: values of `optimizer.variables`, in their order.
            grads: gradients, one for each trainable variable.
            trainable_variables: values of the trainable variables.

        Returns:
            `(trainable_variables, optimizer_variables)` after the step.
        """
        # Not Keras' wrapper's, which puts a conditional round the whole update.
        return keras.optimizers.Optimizer.stateless_apply(
            self, optimizer_variables, grads, trainable_variables
        )

    def _scale_in(self, optimizer_variables: Sequence[Any]) -> Any:
        optimizer_variables = list(optimizer_variables)
        if len(optimizer_variables) != len(self.variables):
            raise ValueError(
                "`optimizer_variables` must hold one value for each of "
                f"`optimizer.variables`. Received: {len(optimizer_variables)} values "
                f"for {len(self.variables)} variables."
            )
        index = next(
            i for i, v in enumerate(self.variables) if v is self.dynamic_scale
        )  # fmt: skip
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
        """Writes Keras' own layout, and the two counters it does not have by name."""
        theirs = [v for v in self.variables if not self._is_counter(v)]
        for index, variable in enumerate(theirs):
            store[str(index)] = variable.numpy()
        for variable in (self._skipped_steps, self._consecutive_skips):
            store[variable.name] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Reads what ours, Keras' wrapper, or the inner optimizer alone has saved."""
        theirs = [v for v in self.variables if not self._is_counter(v)]
        counters = [v for v in self.variables if self._is_counter(v)]
        named = [v for v in counters if v.name in store.keys()]
        count = len(store.keys()) - len(named)
        if count == len(self.inner_optimizer.variables) and not named:
            # Saved before the optimizer was wrapped: the scale starts anew.
            self.inner_optimizer.load_own_variables(store)
            return
        if count != len(theirs):
            # Keras' words for it, as a warning: the model's weights are loaded still.
            super().load_own_variables(store)
            return
        for index, variable in enumerate(theirs):
            variable.assign(store[str(index)])
        for variable in counters:
            variable.assign(store[variable.name] if variable in named else 0)
        scale = np.asarray(store[str(theirs.index(self.dynamic_scale))])
        self.dynamic_scale.assign(
            np.clip(scale, self.rule.min_scale, self.rule.max_scale)
        )

    def _is_counter(self, variable: Any) -> bool:
        return variable is self._skipped_steps or variable is self._consecutive_skips


def wrapper_of(optimizer: Any) -> "LossScaleOptimizer | None":
    """The living wrapper that holds `optimizer`, if there is one."""
    holder = _holders.get(optimizer)
    return holder() if holder is not None else None


def _checked_inner(inner_optimizer: Any) -> Any:
    inner = keras.optimizers.get(inner_optimizer)
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "`inner_optimizer` must not scale the loss itself. Received: "
            f"inner_optimizer={inner_optimizer!r}. Pass the optimizer within it, or "
            "use it as it is."
        )
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise ValueError(
            "`inner_optimizer` must be a Keras optimizer, its name or its config. "
            f"Received: inner_optimizer={inner_optimizer!r}."
        )
    if wrapper_of(inner) is not None:
        # A wrapper that nobody refers to any more may live on in a reference cycle.
        gc.collect()
    if wrapper_of(inner) is not None:
        raise ValueError(
            "`inner_optimizer` must be in one wrapper only. Received: "
            f"inner_optimizer={inner!r}, which another LossScaleOptimizer holds. Use "
            "that one, or create the inner optimizer anew."
        )
    return inner


def _refuse_inner_arguments(kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if name in _INNER_ARGUMENTS and value != _INNER_ARGUMENTS[name]:
            raise ValueError(
                f"`{name}` must be set on the `inner_optimizer`, not on the wrapper. "
                f"Received: {name}={value!r}."
            )
    unknown = [name for name in kwargs if name not in _INNER_ARGUMENTS]
    if unknown:
        raise ValueError(
            "LossScaleOptimizer does not support arguments: "
            f"`{'`, `'.join(unknown)}`. Received: "
            f"{ {name: kwargs[name] for name in unknown} }."
        )


def _multiply_wide(loss: Any, scale: Any) -> Any:
    """loss * scale in float32: in float16 the product would overflow at once."""
    loss = ops.convert_to_tensor(loss)
    wide = "float64" if keras.backend.standardize_dtype(loss.dtype) == "float64" else (
        "float32"
    )  # fmt: skip
    return ops.multiply(ops.cast(loss, wide), ops.cast(scale, wide))


def _same_shape(grad: Any, variable: Any) -> bool:
    """Compares static shapes; a dimension not known yet fits any."""
    if getattr(grad, "rank", 0) is None:
        return True
    grad, variable = tuple(grad), tuple(variable)
    return len(grad) == len(variable) and all(
        a is None or a == b for a, b in zip(grad, variable, strict=True)
    )
