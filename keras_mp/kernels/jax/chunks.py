"""A large head and its cross-entropy in chunks of the classes, computed twice.

The backward pass computes the logits of each chunk again. On TPUs, unless that is asked
for, there is one chunk, and it keeps its logits.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from keras_mp.kernels import targets as of_targets
from keras_mp.kernels.jax.products import in_float32, multiply
from keras_mp.kernels.logits import Product
from keras_mp.kernels.products import size_of_chunk
from keras_mp.repairs.jax import one_pass
from keras_mp.types import Tensor


def losses(head: Product, number: int, *operands: Any) -> Any:
    """The losses (...,), and the class of the largest logit (...,) if metrics read it.

    Args:
        head: the logits (..., classes).
        number: the number of chunks.
        operands: inputs (..., width), kernel (width, classes), others, and targets:
            integer labels (...,), or probabilities (..., classes).
    """
    classes = head.kernel.shape[-1]
    size = size_of_chunk(classes, number)
    chunks = [_Chunk(head, i, min(i + size, classes)) for i in range(0, classes, size)]
    how = head.operands
    recomputed = how.logits == "recomputed"

    @jax.custom_vjp
    def run(*operands: Any) -> Any:
        return forward(*operands)[0]

    def forward(inputs: Any, kernel: Tensor, others: Sequence, targets: Tensor) -> Any:
        operands = inputs, kernel, others, targets
        parts = [chunk.part(kernel).astype(how.dtype) for chunk in chunks]
        own = jnp.zeros(inputs.shape[:-1], "float32")
        sums: list[Any] = []
        kept: list[Any] = []  # Of each chunk: its product, or None.
        largest: list[tuple[Any, Any]] = []
        for index, chunk in enumerate(chunks):
            if sums:
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
            kept.append(None if recomputed else product)
        total = jax.nn.logsumexp(jnp.stack(sums), axis=0)
        losses = of_targets.weights(targets) * total - own
        losses = jnp.where(of_targets.are_none(targets, classes), 0, losses)
        results = losses, _class_of(largest) if largest else None
        return results, (*operands, parts, total, kept)

    def backward(residuals: Sequence, gradients: Any) -> Any:
        inputs, kernel, others, targets, parts, total, kept = residuals
        gradient, _ = gradients
        weights = of_targets.weights(targets)[..., jnp.newaxis]
        gradient = jnp.where(of_targets.are_none(targets, classes), 0, gradient)
        gradient = gradient[..., jnp.newaxis]
        by_inputs = jnp.zeros(inputs.shape, "float32")
        by_kernel, by_targets = [None] * len(chunks), [None] * len(chunks)
        by_others = [0.0] * len(others)
        for index in range(len(chunks)):
            chunk, held, part = chunks[index], kept[index], parts[index]
            # Again one after the other.
            after = lax.optimization_barrier((inputs, total, by_inputs))
            inputs, total, by_inputs = after
            if len(chunks) > 1:  # Or XLA makes all parts of the kernel at once.
                part, by_inputs = lax.optimization_barrier((part, by_inputs))
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
        if of_targets.are_probabilities(targets):
            wanted = jnp.concatenate(by_targets, axis=-1).astype(targets.dtype)
        by_all = jnp.concatenate(by_kernel, axis=1).astype(kernel.dtype)
        return by_inputs.astype(inputs.dtype), by_all, floating, wanted

    run.defvjp(forward, backward)
    return run(*operands)


def _class_of(largest: Sequence[tuple[Any, Any]]) -> Any:
    """The class of the largest logit, from each chunk's largest and its class."""
    logits, classes = map(jnp.stack, zip(*largest, strict=True))
    chunk = jnp.argmax(logits, axis=0)[jnp.newaxis]
    return jnp.take_along_axis(classes, chunk, axis=0)[0]


class _Chunk:
    """The classes from `start` to `stop` of a head."""

    def __init__(self, head: Product, start: int, stop: int) -> None:
        self._head, self.start, self._stop = head, start, stop

    def product(self, inputs: Any, part: Any) -> Any:
        return in_float32(multiply, inputs.astype(part.dtype), part)

    def logits(self, product: Any, others: Sequence) -> Any:
        return self._head.follow_part(product, others, self.start, self._stop)

    def own(self, logits: Tensor, targets: Tensor) -> Any:
        """The logits of the targets that are among these classes, 0 for the others."""
        if of_targets.are_probabilities(targets):
            return jnp.sum(self.part(targets) * logits, axis=-1)
        labels = targets - self.start
        is_here = one_pass.is_class(labels, logits)
        return jnp.where(is_here, one_pass.own(logits, labels), 0)

    def targets(self, targets: Tensor, logits: Tensor) -> Any:
        """The probabilities of these classes."""
        if of_targets.are_probabilities(targets):
            return self.part(targets)
        return one_pass.is_label(targets - self.start, logits)

    def by_inputs(self, by_product: Any, part: Any) -> Any:
        dtype = self._head.operands.gradient
        return in_float32(multiply, by_product.astype(dtype), part.astype(dtype).T)

    def by_kernel(self, inputs: Any, by_product: Any) -> Any:
        operands = self._head.operands
        rows = tuple(range(inputs.ndim - 1))

        def run(a: Tensor, b: Tensor, dtype: str) -> Any:
            dims = (rows, rows), ((), ())
            return lax.dot_general(a, b, dims, preferred_element_type=dtype)

        pair = inputs.astype(operands.gradient), by_product.astype(operands.gradient)
        if operands.tied:
            return in_float32(run, *pair)
        return run(*pair, operands.gradient)

    def part(self, x: Tensor) -> Any:
        return lax.slice_in_dim(x, self.start, self._stop, axis=x.ndim - 1)
