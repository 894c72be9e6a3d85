"""The cross-entropy of what a head returns.

It is computed from the head's logits, even if the head returns their softmax.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from keras_mp.backends.interface import Wrapper
from keras_mp.backends.jax import compilation
from keras_mp.kernels import logits
from keras_mp.kernels.jax import classes as of_metrics
from keras_mp.kernels.jax import large_heads
from keras_mp.kernels.logits import Product
from keras_mp.repairs.jax import softmax
from keras_mp.repairs.jax.cross_entropy import in_one_pass, may_be_parted_by_classes
from keras_mp.repairs.logits import known
from keras_mp.types import Tensor


def kernels() -> dict[str, Wrapper]:
    return {
        "softmax": lambda original: logits.softmax(softmax.in_float32(original)),
        "sparse_categorical_crossentropy": _in_chunks_or_one_pass,
        "categorical_crossentropy": _loss_of_probabilities,
    }


def _in_chunks_or_one_pass(original: Callable) -> Callable:
    return in_one_pass(original, _in_chunks)


def _loss_of_probabilities(original: Callable) -> Callable:
    # After a softmax Keras clips each probability: we leave that alone.
    @functools.wraps(original)
    def loss(
        target: Any, output: Tensor, from_logits: bool = False, axis: int = -1
    ) -> Any:
        is_known = from_logits and isinstance(known(output), Product)
        if not is_known or axis not in (-1, output.ndim - 1):
            return original(target, output, from_logits, axis)
        targets = jnp.asarray(target, output.dtype)
        if targets.shape != output.shape or may_be_parted_by_classes():
            return original(target, output, from_logits, axis)
        losses = _in_chunks(output, targets, output)
        return original(target, output, True, axis) if losses is None else losses

    return loss


def _in_chunks(x: Tensor, targets: Tensor, output: Tensor) -> Any | None:
    """The losses of logits, in chunks; None if the logits are small or not known.

    Args:
        x: logits.
        targets: labels, or probabilities.
        output: the logits, or their softmax.
    """
    fact = known(x)
    if not (isinstance(fact, Product) and compilation.is_tracing()):
        return None
    # Metrics read what the model returns, not what the loss makes of it.
    if fact.operands.classes and not fact.returned:
        return None
    number = large_heads.number_for(fact)
    if not number:
        return None
    losses, classes = large_heads.losses(fact, targets, number)
    return losses if classes is None else of_metrics.note(losses, output, classes)
