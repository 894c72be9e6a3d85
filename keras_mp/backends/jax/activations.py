"""Activations whose gradient keeps their input alone, not what is computed on the way.

What lies in between is computed once more in the backward pass, without a pass over
memory. A custom gradient alone gains nothing: XLA merges it with the forward pass.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from keras_mp.backends.engine import Wrapper

# In float16 a decoder of two blocks takes 1.29 ms on an H100 for 1.34 with GELU, 1.29
# for 1.31 with SELU, and a seventh of its memory less. Nothing is gained with SiLU,
# softplus, softsign, ELU, sigmoid and its logarithm, tanh and leaky ReLU, and with Mish
# it is lost.
NAMES = ("gelu", "selu")


def repairs() -> dict[str, Wrapper]:
    return dict.fromkeys(NAMES, _keeping_the_input)


def _keeping_the_input(original: Callable) -> Callable:
    @functools.wraps(original)
    def activation(x: Any, *args: Any, **kwargs: Any) -> Any:
        # Outside of a trace nothing is differentiated.
        is_half = isinstance(x, jax.core.Tracer) and x.dtype.itemsize == 2
        if not is_half:
            return original(x, *args, **kwargs)
        return jax.checkpoint(lambda x: original(x, *args, **kwargs))(x)

    return activation
