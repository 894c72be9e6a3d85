"""Sparse cross-entropy of logits in one pass over them.

Keras reads them for their maximum, for the sum of their exponentials, and with a
one-hot of the labels. Here one reduction makes the first two, as in online softmax
(Milakov and Gimelshein 2018), and a gather takes the label's logit.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from keras_mp.types import Tensor


@jax.custom_jvp
def losses(logits: Tensor, labels: Tensor) -> Any:
    """The losses (...,) of logits (..., classes) and integer labels (...,)."""
    return jnp.where(
        is_class(labels, logits), log_sums(logits) - own(logits, labels), 0
    )


def own(logits: Tensor, labels: Tensor) -> Any:
    """The logits of the labels; any number for a label that is not a class."""
    # A gather keeps a TPU from fusing the loss into the product that makes the logits:
    # a decoder's step takes 2.69 GB with it and 2.18 GB without. On an H100 it is free.
    return lax.platform_dependent(logits, labels, tpu=_summed, default=_gathered)


def _gathered(logits: Tensor, labels: Tensor) -> Any:
    """The labels' logits (...,), from (..., classes) and (...,)."""
    rows, columns = jnp.reshape(logits, (-1, logits.shape[-1])), jnp.ravel(labels)
    own = jnp.take_along_axis(rows, columns[:, jnp.newaxis], 1, mode="clip")
    return jnp.reshape(own, labels.shape)


def _summed(logits: Tensor, labels: Tensor) -> Any:
    """The same as a sum over all classes."""
    return jnp.sum(jnp.where(is_label(labels, logits), logits, 0), axis=-1)


@losses.defjvp
def _derivative(primals: Sequence, tangents: Sequence) -> tuple[Any, Any]:
    # The gradient of a gather is not used: its transpose would be a separate kernel.
    logits, labels = primals
    slope = _probabilities(logits) - is_label(labels, logits)
    valid = is_class(labels, logits)[..., jnp.newaxis]
    tangent = jnp.sum(jnp.where(valid, slope, 0) * tangents[0], axis=-1)
    return losses(logits, labels), tangent


@jax.custom_jvp
def log_sums(logits: Tensor) -> Any:
    """The logarithms of the sums of the exponentials: (..., classes) to (...,)."""
    # XLA has no fast reduction of pairs on CPUs: (512, 1000) takes 6.3 ms, not 0.6.
    return lax.platform_dependent(logits, cpu=_in_two_passes, default=_in_one_pass)


def _in_one_pass(logits: Tensor) -> Any:
    return _log_sum(*_reduced(_of_both, logits))


def _in_two_passes(logits: Tensor) -> Any:
    lowest = jnp.finfo(logits.dtype).min
    largest = jnp.max(logits, axis=-1, keepdims=True, initial=lowest)
    total = jnp.sum(jnp.exp(logits - largest), axis=-1)
    return largest[..., 0] + jnp.log(total)


def log_sums_and_largest(logits: Tensor) -> tuple[Any, Any, Any]:
    """The same, the largest logits and their classes, in the same pass: (...,) each."""
    classes = lax.broadcasted_iota("int32", logits.shape, logits.ndim - 1)
    largest, total, first = _reduced(_of_all, logits, classes)
    return _log_sum(largest, total), largest, first


def _log_sum(largest: Any, total: Any) -> Any:
    """As Keras has it, nan if a logit is infinity."""
    return jnp.where(largest == jnp.inf, jnp.nan, largest + jnp.log(total))


def _reduced(combine: Callable, logits: Tensor, *more: Any) -> Any:
    """Combines logits, ones, and more, all (..., classes), to (...,) each."""
    operands = logits, jnp.ones_like(logits), *more
    lowest = jnp.asarray(jnp.finfo(logits.dtype).min, logits.dtype)
    first = lowest, *(jnp.zeros((), x.dtype) for x in operands[1:])
    return lax.reduce(operands, first, combine, (logits.ndim - 1,))


@log_sums.defjvp
def _log_sums_derivative(primals: Sequence, tangents: Sequence) -> tuple[Any, Any]:
    tangent = jnp.sum(_probabilities(primals[0]) * tangents[0], axis=-1)
    return log_sums(*primals), tangent


def _probabilities(logits: Tensor) -> Any:
    return jnp.exp(logits - log_sums(logits)[..., jnp.newaxis])


def _of_both(x: tuple[Any, Any], y: tuple[Any, Any]) -> tuple[Any, Any]:
    """The larger maximum, and the sum of the exponentials after subtracting it."""
    # One of the two factors is always 1. When both were computed, and `_of_all` looked
    # for nan, a profiled H100 took 2.3 ms for Gemma's logits, whose bytes take 1.3 ms.
    other = lax.exp(-lax.abs(x[0] - y[0]))
    total = lax.select(x[0] >= y[0], x[1] + other * y[1], other * x[1] + y[1])
    return lax.max(x[0], y[0]), total


def _of_all(x: tuple[Any, ...], y: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same, and the class of the maximum: the first if equal, any if one is nan."""
    if_not_x = lax.select(y[0] > x[0], y[2], lax.min(x[2], y[2]))
    return *_of_both(x, y), lax.select(x[0] > y[0], x[2], if_not_x)


def is_label(labels: Tensor, logits: Tensor) -> Any:
    classes = lax.broadcasted_iota("int32", logits.shape, logits.ndim - 1)
    return classes == labels[..., jnp.newaxis]


def is_class(labels: Tensor, logits: Tensor) -> Any:
    """Other labels do not count in Keras: their loss and gradient are 0."""
    return (labels >= 0) & (labels < logits.shape[-1])
