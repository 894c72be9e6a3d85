"""A large head and its cross-entropy, differentiated in chunks of the classes.

The gradient of the logits is never there as a whole, nor, if the backward pass computes
them again, are the logits. Known as fused linear cross-entropy (Hsu et al. 2024, Liger
Kernel; Wijmans et al. 2024, Cut Your Losses); here of operations of XLA's.
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
from keras_mp.backends.products import number_of_chunks

_LANES = 128  # Chunks are multiples of what matrix units take.


def number_for(head: Product) -> int:
    """The number of chunks; 0 if the loss reads all logits at a time."""
    shape = *head.inputs.shape[:-1], head.kernel.shape[-1]
    distribution: Any = keras.distribution.distribution()
    devices = math.prod(distribution.device_mesh.shape) if distribution else 1
    return number_of_chunks(4 * math.prod(shape) // devices, head.operands.logits)


def losses(head: Product, targets: Any, number: int) -> Any:
    """The losses (...,) for integer labels (...,), or for probabilities (..., classes).

    There is no forward derivative (`jax.jvp`).
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
    size = _LANES * -(-classes // (_LANES * number))
    chunks = [_Chunk(head, i, min(i + size, classes)) for i in range(0, classes, size)]
    recomputed = head.operands.logits == "recomputed"

    @jax.custom_vjp
    def run(*operands: Any) -> Any:
        return forward(*operands)[0]

    def forward(inputs: Any, kernel: Any, others: Sequence, targets: Any) -> Any:
        operands = inputs, kernel, others, targets
        own = jnp.zeros(inputs.shape[:-1], "float32")
        sums: list[Any] = []
        products: list[Any] = []
        for chunk in chunks:
            if recomputed and sums:
                # One after the other: XLA would keep the logits of several.
                after = lax.optimization_barrier((inputs, own, sums[-1]))
                inputs, own, sums[-1] = after
            product = chunk.product(inputs, kernel)
            logits = chunk.logits(product, others)
            sums.append(one_pass.log_sums(logits))
            own += chunk.own(logits, targets)
            products.append(product)
        total = jax.nn.logsumexp(jnp.stack(sums), axis=0)
        kept = total, None if recomputed else products
        losses = _weights(targets) * total - own
        return jnp.where(_is_none(targets, classes), 0, losses), (*operands, *kept)

    def backward(kept: Sequence, gradient: Any) -> Any:
        inputs, kernel, others, targets, total, products = kept
        weights = _weights(targets)[..., jnp.newaxis]
        gradient = jnp.where(_is_none(targets, classes), 0, gradient)[..., jnp.newaxis]
        by_inputs = jnp.zeros(inputs.shape, "float32")
        by_kernel, by_targets, by_others = [], [], [0.0] * len(others)
        for index, chunk in enumerate(chunks):
            # Again one after the other.
            after = lax.optimization_barrier((inputs, total, by_inputs))
            inputs, total, by_inputs = after
            product = chunk.product(inputs, kernel) if recomputed else products[index]
            logits, pull = jax.vjp(chunk.logits, product, others)
            logarithms = logits - total[..., jnp.newaxis]
            slope = jnp.exp(logarithms) * weights
            slope -= chunk.targets(targets, logits)
            by_product, more = pull(slope * gradient)
            by_targets.append(-logarithms * gradient)
            by_others = [
                x if y.dtype == jax.dtypes.float0 else x + y
                for x, y in zip(by_others, more, strict=True)
            ]
            by_inputs += chunk.by_inputs(by_product, kernel)
            by_kernel.append(chunk.by_kernel(inputs, by_product))
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


def _are_probabilities(targets: Any) -> bool:
    return jnp.issubdtype(targets.dtype, jnp.floating)


def _weights(targets: Any) -> Any:
    """The sums of the targets' probabilities: (...,)."""
    if _are_probabilities(targets):
        return jnp.sum(targets, axis=-1)
    return jnp.ones(targets.shape, "float32")


def _is_none(targets: Any, classes: int) -> Any:
    """Which labels are no class: (...,)."""
    if _are_probabilities(targets):
        return False
    return (targets < 0) | (targets >= classes)


class _Chunk:
    """The classes from `start` to `stop` of a head."""

    def __init__(self, head: Product, start: int, stop: int) -> None:
        self._head, self._start, self._stop = head, start, stop

    def product(self, inputs: Any, kernel: Any) -> Any:
        half = self._head.operands.dtype
        part = self._part(kernel).astype(half)
        return in_float32(multiply, inputs.astype(half), part)

    def logits(self, product: Any, others: Sequence) -> Any:
        return self._head.follow(product, others, self._start, self._stop)

    def own(self, logits: Any, targets: Any) -> Any:
        """The logits of the targets that are among these classes, 0 for the others."""
        if _are_probabilities(targets):
            return jnp.sum(self._part(targets) * logits, axis=-1)
        labels = targets - self._start
        is_here = one_pass.is_class(labels, logits)
        return jnp.where(is_here, one_pass.own(logits, labels), 0)

    def targets(self, targets: Any, logits: Any) -> Any:
        """The probabilities of these classes."""
        if _are_probabilities(targets):
            return self._part(targets)
        return one_pass.is_label(targets - self._start, logits)

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
        return lax.slice_in_dim(x, self._start, self._stop, axis=x.ndim - 1)
