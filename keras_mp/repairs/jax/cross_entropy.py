"""The cross-entropy of labels and what a head returns: it reads the logits once.

It is computed from the head's logits, even if the head returns their softmax.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import keras

from keras_mp.repairs import logits
from keras_mp.repairs.jax import one_pass
from keras_mp.types import Tensor

# What computes (logits, labels, output) another way, or returns None.
Otherwise = Callable[[Any, Any, Any], Any | None]


def _no_other(x: Tensor, labels: Tensor, output: Tensor) -> None:
    return None


def in_one_pass(original: Callable, otherwise: Otherwise = _no_other) -> Callable:
    """Wraps `sparse_categorical_crossentropy`, for the logits of a head.

    Args:
        otherwise: asked first.
    """

    @functools.wraps(original)
    def loss(
        target: Any, output: Tensor, from_logits: bool = False, axis: int = -1
    ) -> Any:
        fact = logits.known(output)
        x = getattr(fact, "logits", output)
        is_known = fact is not None and (x is output) == from_logits
        if not is_known or axis not in (-1, output.ndim - 1):
            return original(target, output, from_logits, axis)
        labels = jnp.asarray(target, "int32")
        if labels.ndim == output.ndim and labels.shape[-1] == 1:
            labels = jnp.squeeze(labels, -1)
        if labels.shape != output.shape[:-1] or may_be_parted_by_classes():
            return original(target, output, from_logits, axis)
        losses = otherwise(x, labels, output)
        if losses is None:
            losses = one_pass.losses(x, labels)
        if not from_logits:  # Keras clips probabilities the same way.
            epsilon = keras.config.epsilon()
            limits = -jnp.log(jnp.asarray([1 - epsilon, epsilon], losses.dtype))
            losses = jnp.clip(losses, limits[0], limits[1])
        return losses

    return loss


def may_be_parted_by_classes() -> bool:
    """If so, XLA would gather the parts, both for one pass and for chunks."""
    distribution = keras.distribution.distribution()
    parted_by_examples = type(None), keras.distribution.DataParallel
    return not isinstance(distribution, parted_by_examples)
