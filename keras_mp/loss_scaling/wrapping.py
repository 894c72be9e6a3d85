"""The wrappers of a model's optimizers: which it needs, when they come and go."""

import weakref
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

import keras_mp.keras_private as private
from keras_mp.backends import engine
from keras_mp.backends.interface import HALF
from keras_mp.backends.train_step import UNDERFLOW, monitored
from keras_mp.loss_scaling import summary, unwrapped
from keras_mp.loss_scaling.optimizer import LossScaleOptimizer
from keras_mp.policies import heads
from keras_mp.policies.layers import is_graph
from keras_mp.rounding.holders import wrapped
from keras_mp.rounding.models import rounded, rounds_weights
from keras_mp.types import Model, Optimizer, Tensor

# The wrapper that a model had, which comes back with its float16 layers.
_wrappers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def computes_in_float16(model: Model) -> bool:
    """Does any layer of the model compute in float16?

    The layers decide, never a policy's name. A Functional or Sequential model computes
    nothing itself; a subclassed model may.
    """
    return any(
        layer.compute_dtype == "float16"
        for layer in private.layers_in(model)
        if not (is_graph(layer) or isinstance(layer, keras.layers.InputLayer))
    )


def watched_for_underflow(model: Model) -> list[Any]:
    """The variables of float16 layers, if a monitor asks for underflowing gradients."""
    if monitored.get(model) != UNDERFLOW:
        return []
    layers = [x for x in private.layers_in(model) if x.compute_dtype == "float16"]
    return [v for layer in layers for v in private.own_trainable(layer)]


def losses_in_float32(losses: Any) -> Any:
    """The losses that a layer adds, in float32: TensorFlow sums no mixed dtypes."""

    def cast(loss: Tensor) -> Any:
        is_half = getattr(loss, "dtype", None) is not None and (
            keras.backend.standardize_dtype(loss.dtype) in HALF
        )
        return ops.cast(loss, "float32") if is_half else loss

    return keras.tree.map_structure(cast, losses)


def wrap_optimizers(model: Model) -> None:
    """Wraps the model's optimizers in the wrappers that they need and do not have yet.

    Rounds bfloat16 weights stochastically and, around that, scales the float16 loss.

    A model with a `train_step` of its own, such as a GAN, may hold further optimizers
    as attributes, besides `model.optimizer`.
    """
    own = model.optimizer
    others = {
        name: value
        for name, value in vars(model).items()
        if isinstance(value, keras.optimizers.Optimizer) and value is not own
    }
    config = private.compile_config(model)
    scales = config.get("auto_scale_loss", True)
    rounds = rounds_weights(model)
    for name, optimizer in {"optimizer": own, **others}.items():
        if rounds:
            _wrap(model, name, rounded)
        if scales and _needs_scaling(model, optimizer):
            _wrap(model, name, _scaled)
        elif not scales and optimizer is not None:
            unwrapped.leave_alone(optimizer)
        summary.note(getattr(model, name))
    heads.note_readers(
        private.layers_in(model),
        _scales(model.optimizer),
        [config.get("metrics"), config.get("weighted_metrics")],
    )


def _wrap(model: Model, name: str, wrap: Callable[[Any], Any]) -> None:
    optimizer = getattr(model, name)
    with engine.optimizer_scope(model):
        wrapper = wrap(optimizer)
    if wrapper is not optimizer:
        _set_optimizer(model, name, wrapper)
        if name == "optimizer":
            # A file then asks for half precision by what it is read into.
            private.compile_config(model)["optimizer"] = wrapper


def _scaled(optimizer: Optimizer) -> LossScaleOptimizer:
    return wrapped(optimizer, LossScaleOptimizer)


def rescale_optimizer(model: Model) -> None:
    """Adds or removes loss scaling after a compiled model's layers changed precision.

    The inner optimizer keeps its state. If loss scaling comes back, so does the same
    wrapper.
    """
    optimizer = model.optimizer
    if isinstance(optimizer, LossScaleOptimizer) and not computes_in_float16(model):
        _set_optimizer(model, "optimizer", optimizer.inner_optimizer)
        # `wrapper_of` alone does not keep it alive.
        _wrappers[model] = optimizer
        # A file stores what `compile` was given.
        config = private.compile_config(model)
        if config["optimizer"] is optimizer:
            config["optimizer"] = optimizer.inner_optimizer
    wrap_optimizers(model)
    if isinstance(model.optimizer, LossScaleOptimizer):
        _wrappers.pop(model, None)


def _needs_scaling(model: Model, optimizer: Optimizer) -> bool:
    return (
        isinstance(optimizer, keras.optimizers.Optimizer)
        and not _scales(optimizer)
        and computes_in_float16(model)
    )


def _scales(optimizer: Optimizer) -> bool:
    scaler = keras.optimizers.LossScaleOptimizer
    return isinstance(optimizer, scaler) or (
        getattr(optimizer, "loss_scale_factor", None) is not None
    )


def _set_optimizer(model: Model, name: str, optimizer: Optimizer) -> None:
    private.untracked(setattr)(model, name, optimizer)


def wrap_add_loss(original: Callable) -> Callable:
    """Wraps the method by which layers add losses."""

    def add_loss(self: Any, loss: Tensor) -> Any:
        return original(self, losses_in_float32(loss))

    return add_loss
