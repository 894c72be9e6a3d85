"""A large head and its cross-entropy, differentiated in chunks of the classes.

The gradient of the logits is never whole in memory, and neither are the logits if the
backward pass computes them again. This is known as fused linear cross-entropy (Hsu et
al. 2024, Liger Kernel; Wijmans et al. 2024, Cut Your Losses); here XLA computes it.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax import lax

from keras_mp.backends.jax import one_pass
from keras_mp.backends.jax.logits import Product
from keras_mp.backends.jax.products import in_float32, multiply
from keras_mp.backends.products import (
    number_of_chunks,
    number_recomputed,
    size_of_chunk,
)


def number_for(head: Product) -> int:
    """The number of chunks; 0 if the loss reads all logits at once."""
    shape = *head.inputs.shape[:-1], head.kernel.shape[-1]
    distribution: Any = keras.distribution.distribution()
    devices = math.prod(distribution.device_mesh.shape) if distribution else 1
    size, width = 4 * math.prod(shape) // devices, head.kernel.shape[0]
    return number_of_chunks(size, width, head.operands.logits, head.operands.classes)


def losses(head: Product, targets: Any, number: int) -> Any:
    """The losses (...,), and the class of the largest logit (...,) if metrics read it.

    There is no forward derivative (`jax.jvp`).

    Args:
        head: the logits (..., classes).
        targets: integer labels (...,), or probabilities (..., classes).
        number: the number of chunks.
    """
    in_chunks = functools.partial(_losses, head, number)
    operands = head.inputs, head.kernel, list(head.others), targets
    if head.operands.logits == "recomputed":
        return in_chunks(*operands)
    # On TPUs XLA computes the gradient of the logits within the products that read it,
    # and never writes it: a decoder's step takes 18.1 ms in one chunk, 19.7 ms in four.
    as_a_whole = functools.partial(_losses, head, 1)
    return lax.platform_dependent(*operands, tpu=as_a_whole, default=in_chunks)


def _losses(head: Product, number: int, *operands: Any) -> Any:
    classes = head.kernel.shape[-1]
    size = size_of_chunk(classes, number)
    chunks = [_Chunk(head, i, min(i + size, classes)) for i in range(0, classes, size)]
    how = head.operands
    # These come first in the forward pass and last in the backward pass, so that the
    # products of the others are kept for the shortest time.
    recomputed = number_recomputed(len(chunks), how.logits, how.classes)

    @jax.custom_vjp
    def run(*operands: Any) -> Any:
        return forward(*operands)[0]

    def forward(inputs: Any, kernel: Any, others: Sequence, targets: Any) -> Any:
        operands = inputs, kernel, others, targets
        half = kernel.astype(how.dtype)
        own = jnp.zeros(inputs.shape[:-1], "float32")
        sums: list[Any] = []
        products: list[Any] = []
        largest: list[tuple[Any, Any]] = []
        for index, chunk in enumerate(chunks):
            if sums and index <= recomputed:
                # One after the other, or XLA keeps the logits of several.
                after = lax.optimization_barrier((inputs, own, sums[-1]))
                inputs, own, sums[-1] = after
            product = chunk.product(inputs, half)
            logits = chunk.logits(product, others)
            if how.classes:
                total, highest, first = one_pass.log_sums_and_largest(logits)
                largest.append((highest, first + chunk.start))
            else:
                total = one_pass.log_sums(logits)
            sums.append(total)
            own += chunk.own(logits, targets)
            products.append(product if index >= recomputed else None)
        total = jax.nn.logsumexp(jnp.stack(sums), axis=0)
        losses = _weights(targets) * total - own
        losses = jnp.where(_is_none(targets, classes), 0, losses)
        results = losses, _class_of(largest) if largest else None
        return results, (*operands, half, total, products)

    def backward(kept: Sequence, gradients: Any) -> Any:
        inputs, kernel, others, targets, half, total, products = kept
        gradient, _ = gradients
        weights = _weights(targets)[..., jnp.newaxis]
        gradient = jnp.where(_is_none(targets, classes), 0, gradient)[..., jnp.newaxis]
        by_inputs = jnp.zeros(inputs.shape, "float32")
        by_kernel, by_targets = [None] * len(chunks), [None] * len(chunks)
        by_others = [0.0] * len(others)
        for index in (*range(recomputed, len(chunks)), *range(recomputed)):
            chunk, product = chunks[index], products[index]
            # Again one after the other.
            after = lax.optimization_barrier((inputs, total, by_inputs))
            inputs, total, by_inputs = after
            if len(chunks) > 1:  # Or XLA makes all parts of the kernel at once.
                half, by_inputs = lax.optimization_barrier((half, by_inputs))
            if product is None:
                product = chunk.product(inputs, half)
            logits, pull = jax.vjp(chunk.logits, product, others)
            logarithms = logits - total[..., jnp.newaxis]
            slope = jnp.exp(logarithms) * weights
            slope -= chunk.targets(targets, logits)
            by_product, more = pull(slope * gradient)
            by_targets[index] = -logarithms * gradient
            by_others = [
                x if y.dtype == jax.dtypes.float0 else x + y
                for x, y in zip(by_others, more, strict=True)
            ]
            factor = half if how.gradient == how.dtype else kernel
            by_inputs += chunk.by_inputs(by_product, factor)
            by_kernel[index] = chunk.by_kernel(inputs, by_product)
        by_all = jnp.concatenate(by_kernel, axis=1).astype(kernel.dtype)
        floating = [
            x if jnp.issubdtype(y.dtype, jnp.floating) else None
            for x, y in zip(by_others, others, strict=True)
        ]
        wanted = None
        if _are_probabilities(targets):
            wanted = jnp.concatenate(by_targets, axis=-1).astype(targets.dtype)
        return by_inputs.astype(inputs.dtype), by_all, floating, wanted

    run.defvjp(forward, backward)
    return run(*operands)


def _class_of(largest: Sequence[tuple[Any, Any]]) -> Any:
    """The class of the largest logit, from each chunk's largest and its class."""
    logits, classes = map(jnp.stack, zip(*largest, strict=True))
    chunk = jnp.argmax(logits, axis=0)[jnp.newaxis]
    return jnp.take_along_axis(classes, chunk, axis=0)[0]


def _are_probabilities(targets: Any) -> bool:
    return jnp.issubdtype(targets.dtype, jnp.floating)


def _weights(targets: Any) -> Any:
    """The sums of the targets' probabilities: (...,)."""
    if _are_probabilities(targets):
        return jnp.sum(targets, axis=-1)
    return jnp.ones(targets.shape, "float32")


def _is_none(targets: Any, classes: int) -> Any:
    """Which labels are not classes: (...,)."""
    if _are_probabilities(targets):
        return False
    return (targets < 0) | (targets >= classes)


class _Chunk:
    """The classes from `start` to `stop` of a head."""

    def __init__(self, head: Product, start: int, stop: int) -> None:
        self._head, self.start, self._stop = head, start, stop

    def product(self, inputs: Any, half: Any) -> Any:
        return in_float32(multiply, inputs.astype(half.dtype), self._part(half))

    def logits(self, product: Any, others: Sequence) -> Any:
        return self._head.follow(product, others, self.start, self._stop)

    def own(self, logits: Any, targets: Any) -> Any:
        """The logits of the targets that are among these classes, 0 for the others."""
        if _are_probabilities(targets):
            return jnp.sum(self._part(targets) * logits, axis=-1)
        labels = targets - self.start
        is_here = one_pass.is_class(labels, logits)
        return jnp.where(is_here, one_pass.own(logits, labels), 0)

    def targets(self, targets: Any, logits: Any) -> Any:
        """The probabilities of these classes."""
        if _are_probabilities(targets):
            return self._part(targets)
        return one_pass.is_label(targets - self.start, logits)

    def by_inputs(self, by_product: Any, kernel: Any) -> Any:
        dtype = self._head.operands.gradient
        part = self._part(kernel).astype(dtype)
        return in_float32(multiply, by_product.astype(dtype), part.T)

    def by_kernel(self, inputs: Any, by_product: Any) -> Any:
        operands = self._head.operands
        rows = tuple(range(inputs.ndim - 1))

        def run(a: Any, b: Any, dtype: str) -> Any:
            dims = (rows, rows), ((), ())
            return lax.dot_general(a, b, dims, preferred_element_type=dtype)

        pair = inputs.astype(operands.gradient), by_product.astype(operands.gradient)
        if operands.tied:
            return in_float32(run, *pair)
        return run(*pair, operands.gradient).astype("float32")

    def _part(self, x: Any) -> Any:
        return lax.slice_in_dim(x, self.start, self._stop, axis=x.ndim - 1)
