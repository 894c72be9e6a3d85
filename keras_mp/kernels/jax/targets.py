"""What a cross-entropy takes of its targets: labels (...,), or probabilities."""

from typing import Any

import jax.numpy as jnp

from keras_mp.repairs.jax import one_pass
from keras_mp.types import Tensor


def are_probabilities(targets: Tensor) -> bool:
    """Are they (..., classes), not integer labels (...,)?"""
    return jnp.issubdtype(targets.dtype, jnp.floating)


def weights(targets: Tensor) -> Any:
    """The sums of their probabilities: (...,)."""
    if are_probabilities(targets):
        return jnp.sum(targets, axis=-1)
    return jnp.ones(targets.shape, "float32")


def are_none(targets: Tensor, classes: int) -> Any:
    """Which labels are not classes: (...,). Their loss is 0."""
    if are_probabilities(targets):
        return False
    return (targets < 0) | (targets >= classes)


def own(logits: Tensor, targets: Tensor) -> Any:
    """The logits of the targets (...,); any number for a label that is not a class."""
    if are_probabilities(targets):
        return jnp.sum(targets * logits, axis=-1)
    return one_pass.own(logits, targets)


def slopes(logits: Tensor, total: Any, own: Any, targets: Tensor) -> Any:
    """The derivatives of the losses by the logits (..., classes).

    Args:
        logits: (..., classes).
        total: the logarithms of the sums of their exponentials, (...,).
        own: those of the targets, (...,).
        targets: labels (...,), or probabilities (..., classes).
    """
    found = jnp.exp(logits - total[..., jnp.newaxis])
    if are_probabilities(targets):
        return found * weights(targets)[..., jnp.newaxis] - targets
    # Exact for the label, whose probability may round to 1.
    at_label = jnp.expm1(own - total)[..., jnp.newaxis]
    return jnp.where(one_pass.is_label(targets, logits), at_label, found)
