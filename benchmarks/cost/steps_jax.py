"""Training steps on JAX: a model of Keras under the Adam of Keras and of optax.

Each peer is used as in its documentation. The methods of each class hold what differs
from a step without loss scaling.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

import keras_mp
from benchmarks.cost.cases import Problem
from benchmarks.cost.peers import (
    EPSILON,
    LEARNING_RATE,
    SCALE,
    keras_optimizer,
    moments_of,
)


class JaxStep:
    """A step `(state, batch) -> (state, loss)`; the state is donated.

    The state is (trainable, non-trainable, the optimizer's).
    """

    def __init__(self, problem: Problem, jit: bool) -> None:
        self._model, self._loss = problem.model, problem.loss
        ones = np.ones(len(problem.x), "float32")
        batches = [(problem.x, problem.y, w) for w in (ones, ones * np.inf)]
        self._batches = jax.device_put(batches)
        trainable = [jnp.array(v.value) for v in self._model.trainable_variables]
        self._state: Any = (
            trainable,
            [jnp.array(v.value) for v in self._model.non_trainable_variables],
            self.initial(trainable),
        )
        self.step = jax.jit(self.update, donate_argnums=0) if jit else self.update

    def run(self, steps: int, nonfinite: bool = False) -> None:
        state, batch = self._state, self._batches[nonfinite]
        for _ in range(steps):
            state, _ = self.step(state, batch)
        self._state = jax.block_until_ready(state)

    def weights(self) -> list[np.ndarray]:
        return [np.asarray(x) for x in self._state[0]]

    def arguments(self) -> tuple[Any, Any]:
        """The arguments of `step`, to compile it ahead of time."""
        return self._state, self._batches[0]

    def loss(self, trainable: Any, non_trainable: Any, batch: Any) -> tuple[Any, Any]:
        """The mean loss of a batch, and (it, the new non-trainable variables)."""
        x, y, weights = batch
        y_pred, updated = self._model.stateless_call(
            trainable, non_trainable, x, training=True
        )
        loss = jnp.mean(weights * self._loss(y, y_pred))
        return loss, (loss, updated)

    def initial(self, trainable: Any) -> Any:
        """The optimizer's state before the first step."""
        raise NotImplementedError

    def update(self, state: Any, batch: Any) -> Any:
        """One step."""
        raise NotImplementedError


# The Adam of Keras ----------------------------------------------------------------


class KerasAdam(JaxStep):
    """Keras' Adam without loss scaling."""

    wrapper: Any = None

    def initial(self, trainable: Any) -> Any:
        self._adam, self._optimizer = keras_optimizer(self.wrapper, self._model)
        return [jnp.array(v.value) for v in self._optimizer.variables]

    def scaled(self, own: Any, loss: Any) -> Any:
        return loss

    def update(self, state: Any, batch: Any) -> Any:
        trainable, non_trainable, own = state

        def scaled_loss(trainable: Any) -> Any:
            loss, found = self.loss(trainable, non_trainable, batch)
            return self.scaled(own, loss), found

        grad_fn = jax.value_and_grad(scaled_loss, has_aux=True)
        (_, (loss, updated)), grads = grad_fn(trainable)
        trainable, own = self.applied(own, grads, trainable, loss)
        return (trainable, self.kept(own, non_trainable, updated), own), loss

    def applied(self, own: Any, grads: Any, trainable: Any, loss: Any) -> Any:
        return self._optimizer.stateless_apply(own, grads, trainable)

    def kept(self, own: Any, before: Any, after: Any) -> Any:
        return after

    def moments(self) -> list[np.ndarray]:
        values = zip(self._optimizer.variables, self._state[2], strict=True)
        by_variable = {id(variable): value for variable, value in values}
        return [np.asarray(by_variable[id(v)]) for v in moments_of(self._adam)]


class KerasOwn(KerasAdam):
    """Keras' LossScaleOptimizer."""

    wrapper = keras.optimizers.LossScaleOptimizer

    def scaled(self, own: Any, loss: Any) -> Any:
        # As in Keras' JAXTrainer.
        mapping = list(zip(self._optimizer.variables, own, strict=True))
        with keras.StatelessScope(mapping):
            return self._optimizer.scale_loss(loss)


class Ours(KerasAdam):
    """keras_mp's LossScaleOptimizer, which restores statistics after a skipped step."""

    wrapper = keras_mp.LossScaleOptimizer

    def scaled(self, own: Any, loss: Any) -> Any:
        return self._optimizer.stateless_scale_loss(own, loss)

    def applied(self, own: Any, grads: Any, trainable: Any, loss: Any) -> Any:
        return self._optimizer.stateless_apply(own, grads, trainable, loss=loss)

    def kept(self, own: Any, before: Any, after: Any) -> Any:
        return self._optimizer.stateless_undo_skipped(own, before, after)


# The Adam of optax ----------------------------------------------------------------


class OptaxAdam(JaxStep):
    """optax's Adam without loss scaling; the state is (optax's, the loss scale's)."""

    def initial(self, trainable: Any) -> Any:
        import optax

        self._adam = self.wrapped(optax.adam(LEARNING_RATE, eps=EPSILON))
        return self._adam.init(trainable), self.scale()

    def wrapped(self, adam: Any) -> Any:
        return adam

    def scale(self) -> Any:
        return ()

    def update(self, state: Any, batch: Any) -> Any:
        trainable, non_trainable, (own, scale) = state

        def loss(trainable: Any) -> Any:
            return self.loss(trainable, non_trainable, batch)

        grads, found, scale, finite = self.unscaled(loss, scale, trainable)
        after, own_after = self.stepped(grads, own, trainable)
        if finite is not None:
            after, own_after = self.selected(
                finite, (after, own_after), (trainable, own)
            )
        value, updated = found
        return (after, updated, (own_after, scale)), value

    def unscaled(self, loss: Callable, scale: Any, trainable: Any) -> Any:
        """(gradients, the second result of `loss`, the next scale, finite or None)."""
        grads, found = jax.grad(loss, has_aux=True)(trainable)
        return grads, found, scale, None

    def stepped(self, grads: Any, own: Any, trainable: Any) -> tuple[Any, Any]:
        import optax

        updates, own = self._adam.update(grads, own, trainable)
        return optax.apply_updates(trainable, updates), own

    def selected(self, finite: Any, after: Any, before: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), after, before)

    def moments(self) -> list[np.ndarray]:
        found = [
            x
            for x in jax.tree.leaves(self._state[2], is_leaf=_has_moments)
            if _has_moments(x)
        ]
        return [np.asarray(x) for x in [*found[0].mu, *found[0].nu]]


def _has_moments(x: Any) -> bool:
    return hasattr(x, "mu") and hasattr(x, "nu")


class ApplyIfFinite(OptaxAdam):
    """`optax.apply_if_finite` with a fixed loss scale: it has no other."""

    def wrapped(self, adam: Any) -> Any:
        import optax

        unscaling = optax.chain(optax.scale(1 / SCALE), adam)
        return optax.apply_if_finite(unscaling, max_consecutive_errors=10)

    def unscaled(self, loss: Callable, scale: Any, trainable: Any) -> Any:
        def scaled(trainable: Any) -> Any:
            value, found = loss(trainable)
            return value * SCALE, found

        return super().unscaled(scaled, scale, trainable)


class Flax(OptaxAdam):
    """flax's DynamicScale, as in its ImageNet example."""

    def scale(self) -> Any:
        from flax.training.dynamic_scale import DynamicScale

        # Arrays from the start: with Python numbers JAX would compile twice.
        return DynamicScale(
            scale=jnp.asarray(SCALE, "float32"), fin_steps=jnp.asarray(0, "int32")
        )

    def unscaled(self, loss: Callable, scale: Any, trainable: Any) -> Any:
        scale, finite, (_, found), grads = scale.value_and_grad(loss, has_aux=True)(
            trainable
        )
        return grads, found, scale, finite


class Jmp(OptaxAdam):
    """jmp's DynamicLossScale, as in its README."""

    def scale(self) -> Any:
        import jmp

        return jmp.DynamicLossScale(
            jnp.asarray(SCALE, "float32"), jnp.asarray(0, "int32")
        )

    def unscaled(self, loss: Callable, scale: Any, trainable: Any) -> Any:
        import jmp

        def scaled(trainable: Any) -> Any:
            value, found = loss(trainable)
            return scale.scale(value), found

        grads, found = jax.grad(scaled, has_aux=True)(trainable)
        grads = scale.unscale(grads)
        finite = jmp.all_finite(grads)
        return grads, found, scale.adjust(finite), finite

    def selected(self, finite: Any, after: Any, before: Any) -> Any:
        import jmp

        return jmp.select_tree(finite, after, before)


class Mpx(OptaxAdam):
    """mixed-precision-for-jax: the parts of its `filter_grad` that do not cast."""

    def scale(self) -> Any:
        import mpx

        return mpx.DynamicLossScaling(
            jnp.asarray(SCALE, "float32"),
            min_loss_scaling=jnp.asarray(1.0, "float32"),
            counter=jnp.asarray(0, "int32"),
        )

    def unscaled(self, loss: Callable, scale: Any, trainable: Any) -> Any:
        import mpx

        scaled = mpx.scaled(loss, scale, has_aux=True)
        grads, found = jax.grad(scaled, has_aux=True)(trainable)
        finite = mpx.all_finite(grads)
        scale = scale.adjust(finite)
        return scale.unscale(grads), found, scale, finite

    def selected(self, finite: Any, after: Any, before: Any) -> Any:
        import mpx

        return mpx.select_tree(finite, after, before)


UNSCALED = {"keras": KerasAdam, "optax": OptaxAdam}
SCALED = {
    "keras_mp": Ours,
    "keras": KerasOwn,
    "optax": ApplyIfFinite,
    "flax": Flax,
    "jmp": Jmp,
    "mpx": Mpx,
}
