"""A loss and its gradients, scaled and unscaled in a training loop of the user's."""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
from keras import ops

from keras_mp.backends import engine
from keras_mp.loss_scaling.gradients import divided
from keras_mp.loss_scaling.rule import LossScaleRule
from keras_mp.loss_scaling.skip_watch import SkipWatch
from keras_mp.loss_scaling.stage import GradientStage
from keras_mp.loss_scaling.state import ScalingState
from keras_mp.loss_scaling.underflow import UnderflowWatch


class ExplicitScaling(ScalingState):
    """`scale_loss` and `unscale`, by the scale that the optimizer remembers.

    And their stateless twins, by the scale within values that are handed in.
    """

    def _remember(self, rule: LossScaleRule, skip_watch: SkipWatch) -> None:
        super()._remember(rule, skip_watch)
        self.underflow_watch = UnderflowWatch()
        # The stage is Python's own: TensorFlow's tracking must not wrap it.
        self._stage = GradientStage()

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
        return engine.nonfinite_to_nan(divided(grads, variables, scale))

    def get_scaled_loss(self, loss: Any) -> Any:
        """`scale_loss` under its tf.keras name."""
        return self.scale_loss(loss)

    def get_unscaled_gradients(self, grads: Iterable[Any]) -> list[Any]:
        """`unscale` under its tf.keras name."""
        return self.unscale(grads)

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


def _multiply_wide(loss: Any, scale: Any) -> Any:
    """loss * scale in float32: in float16 the product would overflow at once."""
    loss, scale = ops.convert_to_tensor(loss), ops.convert_to_tensor(scale)
    double = keras.backend.standardize_dtype(loss.dtype) == "float64"
    loss = ops.cast(loss, "float64" if double else "float32")
    return ops.multiply(loss, _factor(ops.stop_gradient(loss), scale))


@engine.compiled(lambda loss, scale: loss)
def _factor(loss: Any, scale: Any) -> Any:
    """The scale, and nan where the loss is not finite.

    Such a loss may have gradients that are, a mean absolute error of infinity for one.
    They become nan, so that its step is skipped everywhere.
    """
    # No select, of which LLVM would compile a loop for each case.
    return ops.cast(scale, loss.dtype) + (loss - loss)
