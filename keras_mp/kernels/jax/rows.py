"""What `kernels/rows.py` takes from JAX, and its loss as JAX differentiates it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from keras_mp.kernels import rows
from keras_mp.kernels import targets as of_targets
from keras_mp.kernels.jax.products import in_float32, multiply
from keras_mp.kernels.logits import Product
from keras_mp.repairs.jax import one_pass
from keras_mp.types import Tensor


def losses(head: Product, number: int, *operands: Any) -> tuple[Any, Any]:
    """The losses (...,), and the class of the largest logit (...,) if metrics read it.

    There is no forward derivative (`jax.jvp`).

    Args:
        head: the logits (..., classes).
        number: the number of chunks.
        operands: inputs (..., width), kernel (width, classes), others, and targets:
            integer labels (...,), or probabilities (..., classes).
    """
    inputs, kernel, others, targets = operands
    loss = rows.Loss(_Tools(), head._replace(inputs=inputs), number)
    none = of_targets.are_none(targets, kernel.shape[-1])

    @jax.custom_vjp
    def run(*operands: Any) -> Any:
        (losses, largest), _ = loss.forward(operands, keeps_slopes=False)
        return losses, largest

    def forward(*operands: Any) -> Any:
        results, kept = loss.forward(operands, keeps_slopes=True)
        return results, (operands, kept)

    def backward(residuals: Sequence, gradients: Any) -> Any:
        operands, kept = residuals
        return tuple(loss.backward(operands, kept, gradients[0]))

    run.defvjp(forward, backward)
    losses, largest = run(inputs, kernel, targets, *others)
    return jnp.where(none, 0, losses), largest


class _Tools:
    in_turn = True

    def multiply(self, a: Tensor, b: Tensor, dtype: str) -> Any:
        return _product(multiply, a, b, dtype)

    def multiply_transposed(self, a: Tensor, b: Tensor, dtype: str) -> Any:
        return _product(multiply, a, b.T, dtype)

    def contract(self, a: Tensor, b: Tensor, dtype: str) -> Any:
        return _product(_contract, a, b, dtype)

    def barrier(self, structure: Any) -> Any:
        return lax.optimization_barrier(structure)

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        # JAX 0.6 has no memory without values.
        return getattr(lax, "empty", jnp.zeros)(tuple(shape), dtype)

    def log_sums(self, logits: Tensor, classes: bool) -> tuple[Any, Any]:
        if not classes:
            return one_pass.log_sums(logits), None
        total, _, largest = one_pass.log_sums_and_largest(logits)
        return total, largest

    def own(self, logits: Tensor, labels: Tensor) -> Any:
        return one_pass.own(logits, labels)

    def pull(self, function: Callable, x: Tensor) -> tuple[Any, Callable]:
        y, pull = jax.vjp(function, x)
        return y, lambda gradient: pull(gradient)[0]


def _product(run: Callable, a: Tensor, b: Tensor, dtype: str) -> Any:
    return in_float32(run, a, b) if dtype == "float32" else run(a, b, dtype)


def _contract(a: Tensor, b: Tensor, dtype: str) -> Any:
    dims = ((0, 1), (0, 1)), ((), ())
    return lax.dot_general(a, b, dims, preferred_element_type=dtype)
