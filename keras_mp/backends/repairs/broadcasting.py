"""Gradients of what is broadcast, a bias or a gain, summed in float32.

Such a gradient is a sum over all positions. Where a backend makes it in the dtype of
its terms it stalls: in bfloat16 at 256 times the size of a term, in float16 at 2048.
On CPUs both JAX and TensorFlow do so.
"""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

HALF = ("float16", "bfloat16")


def summed_in_float32(operation: Callable) -> Callable:
    """A Keras backend's `add`, `subtract` or `multiply` with right sums of gradients.

    What is broadcast in half precision is broadcast in float32 and rounded back, which
    changes nothing; the gradient of that is a sum in float32. Compiled it is free.
    Elsewhere than on JAX and TensorFlow it is the function itself.
    """
    make = _STALLS.get(keras.backend.backend())
    if make is None:
        return operation
    stalls = make()

    def operate(x1: Any, x2: Any) -> Any:
        # A variable has the dtype of its autocast scope.
        if isinstance(x1, keras.Variable):
            x1 = x1.value
        if isinstance(x2, keras.Variable):
            x2 = x2.value
        if stalls(x1, x2):
            x1, x2 = _wide(x1, x2), _wide(x2, x1)
        return operation(x1, x2)

    return operate


def _on_jax() -> Callable[[Any, Any], bool]:
    from jax import Array
    from jax.core import Tracer

    def stalls(x1: Any, x2: Any) -> bool:
        return (
            # Outside of a trace nothing is differentiated.
            (isinstance(x1, Tracer) or isinstance(x2, Tracer))
            and isinstance(x1, Array)
            and isinstance(x2, Array)
            and x1.dtype == x2.dtype
            and x1.dtype.name in HALF
        )

    return stalls


def _on_tensorflow() -> Callable[[Any, Any], bool]:
    import tensorflow as tf

    def stalls(x1: Any, x2: Any) -> bool:
        return (
            isinstance(x1, tf.Tensor)
            and isinstance(x2, tf.Tensor)
            and x1.dtype == x2.dtype
            and x1.dtype.name in HALF
            and None not in (x1.shape.rank, x2.shape.rank)
            and not tf.config.list_physical_devices("GPU")
        )

    return stalls


_STALLS = {"jax": _on_jax, "tensorflow": _on_tensorflow}


def _wide(x: Any, other: Any) -> Any:
    """`x` in the shape of `other`, if that is what the operation makes of it."""
    sizes = zip(reversed(x.shape), reversed(other.shape), strict=False)
    if len(x.shape) > len(other.shape) or not all(a in (1, b) for a, b in sizes):
        return x
    if tuple(x.shape) == tuple(other.shape):
        return x
    wide = ops.broadcast_to(ops.cast(x, "float32"), ops.shape(other))
    return ops.cast(wide, x.dtype)
