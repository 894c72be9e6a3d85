"""The cross-entropy of what a head returns.

It is computed from the head's logits, even if the head returns their softmax.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import keras

from keras_mp.backends import products
from keras_mp.backends.interface import Wrapper
from keras_mp.backends.jax import compilation, large_heads, logits, one_pass, softmax
from keras_mp.backends.jax.logits import Probabilities, Product


def kernels() -> dict[str, Wrapper]:
    return {
        "softmax": lambda original: _softmax(softmax.in_float32(original)),
        "sparse_categorical_crossentropy": functools.partial(_loss, in_chunks=True),
        "categorical_crossentropy": _loss_of_probabilities,
    }


def in_one_pass(original: Callable) -> Callable:
    """Wraps the cross-entropy of labels: it reads a head's logits once, as they are."""
    return _loss(original, in_chunks=False)


def _softmax(original: Callable) -> Callable:
    @functools.wraps(original)
    def noting(x: Any, axis: int = -1) -> Any:
        probabilities = original(x, axis)
        if axis == -1 and (products.in_scope() or logits.known(x)):
            logits.note(probabilities, Probabilities(x))
        return probabilities

    return noting


def _loss(original: Callable, in_chunks: bool) -> Callable:
    @functools.wraps(original)
    def loss(
        target: Any, output: Any, from_logits: bool = False, axis: int = -1
    ) -> Any:
        fact = logits.known(output)
        x = fact.logits if isinstance(fact, Probabilities) else output
        is_known = fact is not None and (x is output) == from_logits
        if not is_known or axis not in (-1, output.ndim - 1):
            return original(target, output, from_logits, axis)
        labels = jnp.asarray(target, "int32")
        if labels.ndim == output.ndim and labels.shape[-1] == 1:
            labels = jnp.squeeze(labels, -1)
        if labels.shape != output.shape[:-1] or _may_be_parted_by_classes():
            return original(target, output, from_logits, axis)
        losses = _in_chunks(x, labels, output) if in_chunks else None
        if losses is None:
            losses = one_pass.losses(x, labels)
        if not from_logits:  # Keras clips probabilities the same way.
            epsilon = keras.config.epsilon()
            limits = -jnp.log(jnp.asarray([1 - epsilon, epsilon], losses.dtype))
            losses = jnp.clip(losses, limits[0], limits[1])
        return losses

    return loss


def _loss_of_probabilities(original: Callable) -> Callable:
    # After a softmax Keras clips each probability: we leave that alone.
    @functools.wraps(original)
    def loss(
        target: Any, output: Any, from_logits: bool = False, axis: int = -1
    ) -> Any:
        is_known = from_logits and isinstance(logits.known(output), Product)
        if not is_known or axis not in (-1, output.ndim - 1):
            return original(target, output, from_logits, axis)
        targets = jnp.asarray(target, output.dtype)
        if targets.shape != output.shape or _may_be_parted_by_classes():
            return original(target, output, from_logits, axis)
        losses = _in_chunks(output, targets, output)
        return original(target, output, True, axis) if losses is None else losses

    return loss


def _may_be_parted_by_classes() -> bool:
    """If so, XLA would gather the parts, both for one pass and for chunks."""
    distribution = keras.distribution.distribution()
    parted_by_examples = type(None), keras.distribution.DataParallel
    return not isinstance(distribution, parted_by_examples)


def _in_chunks(x: Any, targets: Any, output: Any) -> Any | None:
    """The losses of logits, in chunks; None if the logits are small or not known.

    Args:
        x: logits.
        targets: labels, or probabilities.
        output: the logits, or their softmax.
    """
    fact = logits.known(x)
    if not (isinstance(fact, Product) and compilation.is_tracing()):
        return None
    # Metrics read what the model returns, not what the loss makes of it.
    if fact.operands.classes and not fact.returned:
        return None
    number = large_heads.number_for(fact)
    if not number:
        return None
    losses, classes = large_heads.losses(fact, targets, number)
    return losses if classes is None else logits.note_classes(losses, output, classes)
