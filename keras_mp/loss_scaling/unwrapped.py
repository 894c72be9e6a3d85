"""Warns of an optimizer whose float16 gradients no loss scale keeps from zero.

In a custom loop nothing wraps a plain Keras optimizer. If it updates weights of layers
that compute in float16, gradients below 2**-24 are lost without a trace: nothing fails,
and nothing learns.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras_mp.keras_private as private
from keras_mp import wanted
from keras_mp.backends import engine
from keras_mp.loss_scaling import stage
from keras_mp.loss_scaling.nonfinite import named
from keras_mp.messages import warn
from keras_mp.policies.paths import layer_path
from keras_mp.policies.record import records
from keras_mp.rounding import lost
from keras_mp.rounding.optimizer import parts_of
from keras_mp.types import Optimizer, Tensor

# Optimizer -> how many layers were known at the last look at it; None: leave it alone.
_seen: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
# The looks that wait for the end of this thread's step.
_thread = threading.local()


def leave_alone(optimizer: Optimizer) -> None:
    """Never warns of an optimizer: it is scaled, or the user wants no scale."""
    for part in parts_of(optimizer):
        _seen[part] = None


def look(optimizer: Optimizer, variables: Sequence[Any] | None) -> None:
    """Warns once of an optimizer that is about to update weights of float16 layers.

    Args:
        optimizer: a plain Keras optimizer.
        variables: what it updates; None for those that it was built with.
    """
    if _seen.get(optimizer, -1) in (None, len(records)):
        return
    waiting = getattr(_thread, "waiting", None)
    if waiting is not None:
        waiting.append((optimizer, variables))
        return
    _seen[optimizer] = len(records)
    if optimizer.loss_scale_factor is not None:
        return
    updated = {id(v) for v in variables or private.own_trainable(optimizer)}
    # Those that were called. A list is made at once, while threads may add some.
    layers = (r.layer() for r in list(records.values()) if r.chosen is not None)
    inside = {
        id(x): x
        for layer in layers
        if layer is not None and layer.compute_dtype == "float16"
        for x in private.layers_in(layer)
    }
    paths = [
        layer_path(layer)
        for layer in inside.values()
        if layer.compute_dtype == "float16"
        and any(id(v) in updated for v in private.own_trainable(layer))
    ]
    if not paths:
        return
    leave_alone(optimizer)
    warn(
        f"Optimizer {optimizer.name!r} updates layers that compute in float16 "
        f"({named(sorted(paths))}), and no loss was scaled for it: gradients below "
        "2**-24 are lost. Write `optimizer = keras_mp.LossScaleOptimizer(optimizer)` "
        "where you create it, and `loss = optimizer.scale_loss(loss)` before you take "
        "the gradients (`optimizer.stateless_scale_loss(optimizer_variables, loss)` "
        "in a function that JAX traces). To train without loss scaling, give the "
        "optimizer `loss_scale_factor=1.0`."
    )


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """Postpones looks to the end: a model's first step may show what must be scaled."""
    before = getattr(_thread, "waiting", None)
    try:
        _thread.waiting = []
        yield
    finally:
        waiting, _thread.waiting = _thread.waiting, before
    for optimizer, variables in waiting:
        look(optimizer, variables)


def wrap_apply(original: Callable) -> Callable:
    """Wraps the update of all optimizers."""

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)  # Read more than once.
        # Within a scaler there is nothing to look for from the second step on.
        is_known = stage.in_scaled_update() and self in lost.seen
        if is_known and not wanted.shards:
            return original(self, grads, trainable_variables)
        look(self, trainable_variables)
        lost.look(self, trainable_variables)
        updated = trainable_variables or private.own_trainable(self)
        with stage.update_by(self), engine.among_shards(updated):
            return original(self, grads, trainable_variables)

    return apply


def wrap_scale_loss(original: Callable) -> Callable:
    """Wraps how Keras' own scaler scales."""

    def scale_loss(self: Any, loss: Tensor) -> Any:
        leave_alone(self.inner_optimizer)
        return original(self, loss)

    return scale_loss
