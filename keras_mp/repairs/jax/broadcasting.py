"""Sums the gradients of what is broadcast in float32, on JAX."""

from collections.abc import Callable
from typing import Any

import jax

from keras_mp.backends.interface import Wrapper
from keras_mp.repairs import broadcasting
from keras_mp.types import Tensor


def is_summed_in_half(x1: Tensor, x2: Tensor) -> bool:
    """Does JAX sum the gradient of a broadcast operand in half precision?"""
    return (
        isinstance(x1, jax.Array)
        and isinstance(x2, jax.Array)
        and x1.dtype == x2.dtype
        and x1.dtype.name in ("float16", "bfloat16")
        and x1.shape != x2.shape
    )


def derived_as(wide: Callable, plain: Callable, *operands: Any) -> Any:
    """Calls `plain` with the derivative of `wide`, another way to write the function.

    XLA would broadcast once, before a loop, and read the result in each of its steps.
    """

    @jax.custom_jvp
    def run(*operands: Any) -> Any:
        return plain(*operands)

    @run.defjvp
    def derivative(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
        return run(*primals), jax.jvp(wide, primals, tangents)[1]

    return run(*operands)


def repairs(derived: Callable[..., Any] = derived_as) -> dict[str, Wrapper]:
    # Outside a trace, nothing is differentiated.
    return broadcasting.repairs(is_summed_in_half, derived, jax.core.Tracer)
