"""Functions that run as one program if they are called eagerly, on JAX."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax


def is_tracing() -> bool:
    """Are we inside jax.jit? Eager jax.grad does not count."""
    # A constant that JAX creates is a tracer only while a program is being recorded:
    # jax.grad outside jit computes it at once. This one takes the least time.
    return isinstance(lax.iota(np.int32, 1), jax.core.Tracer)


def compiled(function: Callable, static: Sequence[int] = ()) -> Callable:
    jitted = jax.jit(function, static_argnums=static)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if not is_tracing():
            return jitted(*args)
        # It becomes a part of the program that is being traced. jax.numpy's functions
        # are jitted themselves, which takes longer than tracing them.
        with jax.disable_jit():
            return function(*args)

    return call
