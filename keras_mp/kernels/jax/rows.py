"""A large head and its cross-entropy in chunks of the rows.

A chunk has all logits of its rows, in float32, and so the slopes of their losses. These
stay, in half precision and in one place: no other pass over the logits is needed, each
product of the gradient is one, and nothing is added up or joined.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from keras_mp.kernels.jax import targets as of_targets
from keras_mp.kernels.jax.logits import Product
from keras_mp.kernels.jax.products import in_float32, multiply
from keras_mp.repairs.jax import one_pass
from keras_mp.types import Tensor

# Slopes by the logits are at most 1, and kept times this. In float16 those below 2**-32
# are then 0, and those above 2**-21 have 11 bits. The inputs are divided by it, and
# multiplied by the gradient of each row's loss.
_SCALE = 2.0**7


def fits(head: Product) -> bool:
    """Do the slopes by the product, from before all other steps, suffice?

    The gradients of biases that are added to it before anything else are their sums.
    """
    biases, others = head.others[: head.added], head.others[head.added :]
    return all(map(_is_of_all_rows, biases)) and not any(map(_is_floating, others))


def losses(head: Product, number: int, *operands: Any) -> tuple[Any, Any]:
    """The losses (...,), and the class of the largest logit (...,) if metrics read it.

    There is no forward derivative (`jax.jvp`).

    Args:
        head: the logits (..., classes).
        number: the number of chunks.
        operands: inputs (..., width), kernel (width, classes), others, and targets:
            integer labels (...,), or probabilities (..., classes).
    """
    how, classes = head.operands, head.kernel.shape[-1]
    shape = head.inputs.shape[:-1]

    def chunks(inputs: Any, others: Sequence, targets: Tensor) -> tuple:
        """Inputs, others, and targets, all (number, ...)."""
        return (
            _split(inputs, number, shape),
            [_split_other(x, number, shape) for x in others],
            _split(targets, number, shape),
        )

    def logits_of(half: Any, inputs: Any, others: Sequence) -> Any:
        """Logits, and their derivative by the product."""
        product = in_float32(multiply, inputs.astype(how.dtype), half)
        return jax.vjp(lambda x: head.follow(x, others, 0, classes), product)

    def steepness(rows: Sequence[int], others: Sequence) -> Any:
        """The largest derivative of a logit by its product, or 1: of a temperature."""
        if head.added == len(head.steps):
            return 1.0
        zeros, ones = jnp.zeros(rows), jnp.ones(rows)
        _, pull = jax.vjp(lambda x: head.follow(x, others, 0, classes), zeros)
        return jnp.maximum(jnp.max(jnp.abs(pull(ones)[0])), 1.0)

    def forward(operands: Sequence, keeps_slopes: bool) -> tuple[Any, Any]:
        inputs, kernel, others, targets = operands
        half = kernel.astype(how.dtype)
        parts = chunks(inputs, others, targets)
        slopes, scale = None, None
        if keeps_slopes:
            slopes = _empty((*parts[0].shape[:-1], classes), how.gradient)
            scale = _SCALE / steepness(slopes.shape[1:], [x[0] for x in parts[1]])
        found: list[tuple[Any, Any]] = []
        for index in range(number):
            # One after the other, or XLA keeps the logits of several.
            parts, slopes, found = lax.optimization_barrier((parts, slopes, found))
            x, more, wanted = jax.tree.map(lambda x, i=index: x[i], parts)
            logits, pull = logits_of(half, x, more)
            largest = None
            if how.classes:
                total, _, largest = one_pass.log_sums_and_largest(logits)
            else:
                total = one_pass.log_sums(logits)
            own = of_targets.own(logits, wanted)
            found.append((of_targets.weights(wanted) * total - own, largest))
            if keeps_slopes:
                (slope,) = pull(of_targets.slopes(logits, total, own, wanted))
                slopes = slopes.at[index].set((slope * scale).astype(how.gradient))
        losses, largest = jax.tree.map(lambda *x: _joined(jnp.stack(x), shape), *found)
        losses = jnp.where(of_targets.are_none(targets, classes), 0, losses)
        return (losses, largest), (slopes, scale)

    @jax.custom_vjp
    def run(*operands: Any) -> Any:
        return forward(operands, keeps_slopes=False)[0]

    def run_and_keep(*operands: Any) -> Any:
        results, kept = forward(operands, keeps_slopes=True)
        return results, (operands, kept)

    def backward(residuals: Sequence, gradients: Any) -> Any:
        (inputs, kernel, others, targets), (slopes, scale) = residuals
        gradient = jnp.where(of_targets.are_none(targets, classes), 0, gradients[0])
        by_row = _split(gradient / scale, number, shape)[..., jnp.newaxis]
        half = kernel.astype(how.gradient)
        by_inputs = in_float32(multiply, slopes, half.T) * by_row
        weighted = (_split(inputs, number, shape) * by_row).astype(how.gradient)
        # It is made beside the slopes: a large one in float32 would be the step's peak.
        # One in half precision is cast before the embedding's gradient is added to it.
        if how.tied and 4 * kernel.size <= slopes.size:
            by_kernel = in_float32(_contract, weighted, slopes)
        else:
            by_kernel = _contract(weighted, slopes, how.gradient)
        by_bias = jnp.sum(slopes.astype("float32") * by_row, axis=(0, 1))
        by_others = [_of_bias(by_bias, x) if _is_floating(x) else None for x in others]
        by_targets = None
        if of_targets.are_probabilities(targets):
            by_targets = by_probabilities(inputs, kernel, others, targets)
            by_targets = by_targets * gradient[..., jnp.newaxis]
        by_inputs = _joined(by_inputs, shape).astype(inputs.dtype)
        return by_inputs, by_kernel.astype(kernel.dtype), by_others, by_targets

    def by_probabilities(
        inputs: Any, kernel: Tensor, others: Sequence, targets: Tensor
    ) -> Any:
        """The derivatives by them, hardly ever asked for: from logits made again."""
        half, parts = kernel.astype(how.dtype), chunks(inputs, others, targets)
        found = []
        for index in range(number):
            x, more, _ = jax.tree.map(lambda x, i=index: x[i], parts)
            found.append(-jax.nn.log_softmax(logits_of(half, x, more)[0]))
        return _joined(jnp.stack(found), shape).astype(targets.dtype)

    run.defvjp(run_and_keep, backward)
    return run(*operands)


def _contract(a: Tensor, b: Tensor, dtype: str) -> Any:
    """The product of (..., rows, width) and (..., rows, classes) over all rows."""
    dims = ((0, 1), (0, 1)), ((), ())
    return lax.dot_general(a, b, dims, preferred_element_type=dtype)


def _empty(shape: Sequence[int], dtype: str) -> Any:
    # JAX 0.6 has no memory without values.
    return getattr(lax, "empty", jnp.zeros)(tuple(shape), dtype)


def _is_of_all_rows(x: Tensor) -> bool:
    return math.prod(x.shape[:-1]) == 1


def _is_floating(x: Tensor) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _of_bias(by_bias: Any, bias: Tensor) -> Any:
    """The gradient of a bias, from that of one for each class."""
    if bias.size == 1:
        by_bias = jnp.sum(by_bias)
    return jnp.reshape(by_bias, bias.shape).astype(bias.dtype)


def _split(x: Tensor, number: int, shape: Sequence[int]) -> Any:
    """The rows of (*shape, ...) as (number, rows, ...), filled up with zeros.

    Each chunk takes every `number`-th row: so each device has some of every chunk.
    """
    flat = jnp.reshape(x, (-1, *x.shape[len(shape) :]))
    missing = -len(flat) % number
    flat = jnp.pad(flat, [(0, missing), *[(0, 0)] * (flat.ndim - 1)])
    return jnp.swapaxes(jnp.reshape(flat, (-1, number, *flat.shape[1:])), 0, 1)


def _split_other(x: Tensor, number: int, shape: Sequence[int]) -> Any:
    """The same of what broadcasts to logits; if it has no rows, (number, ...)."""
    if _is_of_all_rows(x):
        return jnp.broadcast_to(jnp.reshape(x, x.shape[-1:]), (number, *x.shape[-1:]))
    return _split(jnp.broadcast_to(x, (*shape, x.shape[-1])), number, shape)


def _joined(x: Tensor, shape: Sequence[int]) -> Any:
    """The rows of (number, rows, ...) again: (*shape, ...)."""
    flat = jnp.reshape(jnp.swapaxes(x, 0, 1), (-1, *x.shape[2:]))
    return jnp.reshape(flat[: math.prod(shape)], (*shape, *x.shape[2:]))
