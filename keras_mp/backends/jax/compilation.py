"""Functions that are one program where they are called eagerly, on JAX."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax


def is_tracing() -> bool:
    """Are we inside jax.jit? Eager jax.grad does not count."""
    # What JAX creates is a tracer only where a program is being recorded: jax.grad
    # outside jit computes such constants at once. This one takes the least time.
    return isinstance(lax.iota(np.int32, 1), jax.core.Tracer)


def compiled(function: Callable, static: Sequence[int] = ()) -> Callable:
    jitted = jax.jit(function, static_argnums=static)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if not is_tracing():
            return jitted(*args)
        # A part of the program that is being traced. Functions of jax.numpy are jitted
        # themselves, which takes longer than to trace them.
        with jax.disable_jit():
            return function(*args)

    return call
