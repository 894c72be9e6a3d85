"""After a convolution, a ReLU keeps its result alone for the gradient.

The next convolution keeps that anyway. Left to itself XLA takes the signs from the
input, and so writes and keeps both.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from keras_mp.backends.interface import HALF, Wrapper, around
from keras_mp.backends.known import IN_USE, Known
from keras_mp.types import Tensor

_OPERATIONS = "conv", "conv_transpose", "depthwise_conv"
_results: Known[bool] = Known()
IN_USE.append(_results.facts)


# Compiled in float16 for an H100, and read as flops and bytes, VGG-16 takes 7.00 ms,
# not 7.66, in 0.79 of the memory. After a batch normalization a step takes more of
# both, as XLA computes the signs from what that keeps. After a dense layer nothing is
# gained: the product that reads the result computes it from the input. A leaky ReLU
# takes more time.
def kernels(others: dict[str, Wrapper]) -> dict[str, Wrapper]:
    """Wrappers of convolutions and `relu`, around others by the same name."""
    noted = around(others, _OPERATIONS, _noted)
    return {**others, **noted, "relu": _relu_of_a_convolution}


def passed_on(derived: Callable[..., Any]) -> Callable[..., Any]:
    """Notes the sum of a convolution's result and a bias as such a result, too.

    Args:
        derived: computes it, as `derived(wide, plain, *operands)`.
    """

    def summed(wide: Callable, plain: Callable, *operands: Any) -> Any:
        result = derived(wide, plain, *operands)
        if _results.facts and any(map(_results.get, operands)):
            _results.note(result, True)
        return result

    return summed


def _noted(original: Callable) -> Callable:
    @functools.wraps(original)
    def convolution(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        # Outside a trace, nothing is differentiated.
        if isinstance(result, jax.core.Tracer) and result.dtype.name in HALF:
            _results.note(result, True)
        return result

    return convolution


def _relu_of_a_convolution(original: Callable) -> Callable:
    @functools.wraps(original)
    def activation(x: Tensor) -> Any:
        return relu(x) if _results.get(x) else original(x)

    return activation


@jax.custom_jvp
def relu(x: Tensor) -> Any:
    return jnp.maximum(x, 0)


@relu.defjvp
def _derivative(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    (x,), (dx,) = primals, tangents
    # XLA would compare the input instead of what is behind this barrier.
    result = lax.optimization_barrier(relu(x))
    return result, jnp.where(result > 0, dx, 0)
