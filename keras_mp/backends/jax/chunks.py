"""A large head and its cross-entropy, differentiated in chunks of the classes.

The gradient of the logits is never whole in memory, and neither are the logits if the
backward pass computes them again or makes do with half precision. This is known as
fused linear cross-entropy (Hsu et al. 2024, Liger Kernel; Wijmans et al. 2024, Cut Your
Losses); here XLA computes it.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
from jax import lax

from keras_mp.backends.interface import HALF
from keras_mp.backends.jax import one_pass
from keras_mp.backends.jax.logits import Product
from keras_mp.backends.jax.products import in_float32, multiply
from keras_mp.backends.products import (
    keeps_half,
    number_of_chunks,
    number_recomputed,
    size_of_chunk,
)

# Exponentials are at most 1, and kept in float16 times this: those below 2**-38 are
# then 0, and those above 2**-28 have 11 bits.
_LARGEST = 2.0**14


def number_for(head: Product, targets: Any) -> int:
    """The number of chunks; 0 if the loss reads all logits at once."""
    if _is_wide(head) and not _exponentials_suffice(head, targets):
        return 0
    shape = *head.inputs.shape[:-1], head.kernel.shape[-1]
    distribution: Any = keras.distribution.distribution()
    devices = math.prod(distribution.device_mesh.shape) if distribution else 1
    return number_of_chunks(4 * math.prod(shape) // devices, head.operands.logits)


def losses(head: Product, targets: Any, number: int) -> Any:
    """The losses (...,), and the class of the largest logit (...,) if metrics read it.

    There is no forward derivative (`jax.jvp`).

    Args:
        head: the logits (..., classes).
        targets: integer labels (...,), or probabilities (..., classes).
        number: the number of chunks.
    """
    operands = head.inputs, head.kernel, list(head.others), targets
    in_half = _is_wide(head) and _exponentials_suffice(head, targets)
    in_chunks = functools.partial(_losses, head, number, in_half)
    if head.operands.logits == "recomputed":
        return in_chunks(*operands)
    # On TPUs XLA computes the gradient of the logits within the products that read it,
    # and never writes it: a decoder's step takes 18.1 ms in one chunk, 19.7 ms in four.
    as_a_whole = functools.partial(_losses, head, 1, False)
    return lax.platform_dependent(*operands, tpu=as_a_whole, default=in_chunks)


def _is_wide(head: Product) -> bool:
    how = head.operands
    return keeps_half(head.kernel.shape[0], how.logits, how.classes)


def _exponentials_suffice(head: Product, targets: Any) -> bool:
    """Is the gradient made of exponentials in float16 as good?

    Its own products must round to half precision as well. What caps a product, and
    targets that are probabilities, need the logits themselves.
    """
    rounds = head.operands.gradient in HALF
    return rounds and head.adds_only and not _are_probabilities(targets)


def _losses(head: Product, number: int, in_half: bool, *operands: Any) -> Any:
    classes = head.kernel.shape[-1]
    size = size_of_chunk(classes, number)
    chunks = [_Chunk(head, i, min(i + size, classes)) for i in range(0, classes, size)]
    how = head.operands
    # These come first in the forward pass and last in the backward pass, so that the
    # products of the others are kept for the shortest time.
    recomputed = number_recomputed(len(chunks), how.logits, how.classes)
    if in_half:
        recomputed = 0

    @jax.custom_vjp
    def run(*operands: Any) -> Any:
        return forward(*operands)[0]

    def forward(inputs: Any, kernel: Any, others: Sequence, targets: Any) -> Any:
        operands = inputs, kernel, others, targets
        parts = [chunk.part(kernel).astype(how.dtype) for chunk in chunks]
        own = jnp.zeros(inputs.shape[:-1], "float32")
        so_far = jnp.full_like(own, jnp.finfo(own.dtype).min)
        sums: list[Any] = []
        kept: list[Any] = []  # Of each chunk: its product, exponentials, or None.
        largest: list[tuple[Any, Any]] = []
        for index, chunk in enumerate(chunks):
            if sums and index <= recomputed:
                # One after the other, or XLA keeps the logits of several.
                after = lax.optimization_barrier((inputs, own, sums[-1]))
                inputs, own, sums[-1] = after
            product = chunk.product(inputs, parts[index])
            logits = chunk.logits(product, others)
            if how.classes:
                total, highest, first = one_pass.log_sums_and_largest(logits)
                largest.append((highest, first + chunk.start))
            else:
                total = one_pass.log_sums(logits)
            sums.append(total)
            own += chunk.own(logits, targets)
            if in_half:
                so_far = jnp.logaddexp(so_far, total)
                kept.append(_Exponentials.of(logits, so_far))
                # Or XLA keeps the logits, and takes the exponentials later.
                after = lax.optimization_barrier((inputs, own, sums, kept))
                inputs, own, sums, kept = after
            else:
                kept.append(product if index >= recomputed else None)
        total = jax.nn.logsumexp(jnp.stack(sums), axis=0)
        losses = _weights(targets) * total - own
        losses = jnp.where(_is_none(targets, classes), 0, losses)
        results = losses, _class_of(largest) if largest else None
        return results, (*operands, parts, total, own, kept)

    def backward(residuals: Sequence, gradients: Any) -> Any:
        inputs, kernel, others, targets, parts, total, own, kept = residuals
        gradient, _ = gradients
        weights = _weights(targets)[..., jnp.newaxis]
        gradient = jnp.where(_is_none(targets, classes), 0, gradient)[..., jnp.newaxis]
        by_inputs = jnp.zeros(inputs.shape, "float32")
        by_kernel, by_targets = [None] * len(chunks), [None] * len(chunks)
        by_others = [0.0] * len(others)
        for index in (*range(recomputed, len(chunks)), *range(recomputed)):
            chunk, held, part = chunks[index], kept[index], parts[index]
            # Again one after the other.
            after = lax.optimization_barrier((inputs, total, by_inputs))
            inputs, total, by_inputs = after
            if len(chunks) > 1:  # Or XLA makes all parts of the kernel at once.
                part, by_inputs = lax.optimization_barrier((part, by_inputs))
            if in_half:
                shape = (*inputs.shape[:-1], part.shape[-1])
                _, pull = jax.vjp(chunk.logits, jnp.zeros(shape), others)
                slope = chunk.slope(held, targets, total, own)
            else:
                product = chunk.product(inputs, part) if held is None else held
                logits, pull = jax.vjp(chunk.logits, product, others)
                logarithms = logits - total[..., jnp.newaxis]
                slope = jnp.exp(logarithms) * weights
                slope -= chunk.targets(targets, logits)
                by_targets[index] = -logarithms * gradient
            by_product, more = pull(slope * gradient)
            by_others = [
                x if y.dtype == jax.dtypes.float0 else x + y
                for x, y in zip(by_others, more, strict=True)
            ]
            factor = part if how.gradient == how.dtype else chunk.part(kernel)
            by_inputs += chunk.by_inputs(by_product, factor)
            by_kernel[index] = chunk.by_kernel(inputs, by_product)
        floating = [
            x if jnp.issubdtype(y.dtype, jnp.floating) else None
            for x, y in zip(by_others, others, strict=True)
        ]
        wanted = None
        if _are_probabilities(targets):
            wanted = jnp.concatenate(by_targets, axis=-1).astype(targets.dtype)
        by_all = _joined(by_kernel).astype(kernel.dtype)
        return by_inputs.astype(inputs.dtype), by_all, floating, wanted

    run.defvjp(forward, backward)
    return run(*operands)


def _joined(parts: Sequence[Any]) -> Any:
    """The parts of a kernel, side by side."""
    # Without the barrier XLA joins them in each kernel of the update.
    return lax.optimization_barrier(jnp.concatenate(parts, axis=1))


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


class _Exponentials(NamedTuple):
    """The exponentials of a chunk's logits, over the sum of all up to this chunk.

    Attributes:
        values: (..., classes), float16, at most `_LARGEST`.
        so_far: the logarithm of the sum: (...,).
    """

    values: Any
    so_far: Any

    @classmethod
    def of(cls, logits: Any, so_far: Any) -> "_Exponentials":
        values = jnp.exp(logits - so_far[..., jnp.newaxis]) * _LARGEST
        return cls(values.astype("float16"), so_far)

    def probabilities(self, total: Any) -> Any:
        share = jnp.exp(self.so_far - total) / _LARGEST
        return self.values.astype("float32") * share[..., jnp.newaxis]


class _Chunk:
    """The classes from `start` to `stop` of a head."""

    def __init__(self, head: Product, start: int, stop: int) -> None:
        self._head, self.start, self._stop = head, start, stop

    def product(self, inputs: Any, part: Any) -> Any:
        return in_float32(multiply, inputs.astype(part.dtype), part)

    def logits(self, product: Any, others: Sequence) -> Any:
        return self._head.follow(product, others, self.start, self._stop)

    def own(self, logits: Any, targets: Any) -> Any:
        """The logits of the targets that are among these classes, 0 for the others."""
        if _are_probabilities(targets):
            return jnp.sum(self.part(targets) * logits, axis=-1)
        labels = targets - self.start
        is_here = one_pass.is_class(labels, logits)
        return jnp.where(is_here, one_pass.own(logits, labels), 0)

    def slope(self, kept: _Exponentials, labels: Any, total: Any, own: Any) -> Any:
        """The derivatives of the losses by these logits, exact for the labels' own."""
        probabilities = kept.probabilities(total)
        is_label = self.targets(labels, probabilities)
        at_label = jnp.expm1(own - total)[..., jnp.newaxis]
        return jnp.where(is_label, at_label, probabilities)

    def targets(self, targets: Any, logits: Any) -> Any:
        """The probabilities of these classes."""
        if _are_probabilities(targets):
            return self.part(targets)
        return one_pass.is_label(targets - self.start, logits)

    def by_inputs(self, by_product: Any, part: Any) -> Any:
        dtype = self._head.operands.gradient
        return in_float32(multiply, by_product.astype(dtype), part.astype(dtype).T)

    def by_kernel(self, inputs: Any, by_product: Any) -> Any:
        operands = self._head.operands
        rows = tuple(range(inputs.ndim - 1))

        def run(a: Any, b: Any, dtype: str) -> Any:
            dims = (rows, rows), ((), ())
            return lax.dot_general(a, b, dims, preferred_element_type=dtype)

        pair = inputs.astype(operands.gradient), by_product.astype(operands.gradient)
        if operands.tied:
            return in_float32(run, *pair)
        return run(*pair, operands.gradient)

    def part(self, x: Any) -> Any:
        return lax.slice_in_dim(x, self.start, self._stop, axis=x.ndim - 1)
