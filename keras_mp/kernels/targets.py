"""What a cross-entropy takes of its targets: labels (...,), or probabilities."""

from typing import Any

import keras
from keras import ops

from keras_mp.types import Tensor


def is_floating(x: Tensor) -> bool:
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(x.dtype))


# They are (..., classes) then, not integer labels (...,).
are_probabilities = is_floating


def weights(targets: Tensor) -> Any:
    """The sums of their probabilities: (...,)."""
    if are_probabilities(targets):
        return ops.sum(targets, axis=-1)
    return ops.ones(ops.shape(targets), "float32")


def are_none(targets: Tensor, classes: int) -> Any:
    """Which labels are not classes: (...,)."""
    if are_probabilities(targets):
        return False
    return (targets < 0) | (targets >= classes)


def slopes(logits: Tensor, total: Any, own: Any, targets: Tensor) -> Any:
    """The derivatives of the losses by the logits (..., classes).

    Args:
        logits: (..., classes).
        total: the logarithms of the sums of their exponentials, (...,).
        own: those of the targets, (...,).
        targets: labels (...,), or probabilities (..., classes).
    """
    found = ops.exp(logits - total[..., None])
    if are_probabilities(targets):
        return found * weights(targets)[..., None] - targets
    # Exact for the label, whose probability may round to 1.
    at_label = ops.expm1(own - total)[..., None]
    is_label = ops.arange(logits.shape[-1], dtype="int32") == targets[..., None]
    return ops.where(is_label, at_label, found)
