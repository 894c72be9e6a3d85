"""Sums the gradients of what is broadcast, a bias or a gain, in float32.

Such a gradient is a sum over all positions. A sum in half precision stalls: in bfloat16
at 256 times the size of a term, in float16 at 2048. On CPUs both JAX and TensorFlow sum
in half precision.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_mp.backends.interface import Wrapper
from keras_mp.types import Tensor


def repairs(
    is_summed_in_half: Callable[[Any, Any], bool],
    derived_as: Callable[..., Any] = lambda wide, plain, *operands: wide(*operands),
    traced: type = object,
    broadcast: Callable[[Any, Any], Any] | None = None,
) -> dict[str, Wrapper]:
    """Wrappers of `add`, `subtract` and `multiply` whose gradients do not stall.

    They broadcast half-precision operands in float32 and cast them back, which changes
    no value; the gradient of a broadcast in float32 is a sum in float32. It costs
    nothing if it is compiled.

    Args:
        is_summed_in_half: whether the backend would sum the gradient of an operation on
            these two in half precision.
        derived_as: as `derived_as(wide, plain, x1, x2)` it computes the operation. The
            derivative is that of `wide`, which broadcasts; the value may be `plain`'s.
        traced: the type of what is differentiated; one of both operands has it.
        broadcast: returns a float32 tensor in the shape of another one.
    """
    broadcast = broadcast or _to_shape_of

    def wrap(original: Callable) -> Callable:
        @functools.wraps(original)
        def operation(x1: Tensor, x2: Tensor) -> Any:
            # A variable has the dtype of its autocast scope.
            if isinstance(x1, keras.Variable):
                x1 = x1.value
            if isinstance(x2, keras.Variable):
                x2 = x2.value
            is_traced = isinstance(x1, traced) or isinstance(x2, traced)
            if is_traced and is_summed_in_half(x1, x2):
                return derived_as(wide, original, x1, x2)
            return original(x1, x2)

        def wide(x1: Tensor, x2: Tensor) -> Any:
            return original(brought(x1, x2), brought(x2, x1))

        def brought(x: Tensor, other: Any) -> Any:
            # Would the operation broadcast `x` to the shape of `other`?
            if len(x.shape) > len(other.shape) or tuple(x.shape) == tuple(other.shape):
                return x
            for a, b in zip(reversed(x.shape), reversed(other.shape), strict=False):
                if a not in (1, b):
                    return x
            return ops.cast(broadcast(ops.cast(x, "float32"), other), x.dtype)

        return operation

    return dict.fromkeys(("add", "subtract", "multiply"), wrap)


def _to_shape_of(x: Tensor, other: Any) -> Any:
    # An unknown size of `other` may be 1: the size of `x` is used.
    added = len(other.shape) - len(x.shape)
    own, shape = ops.shape(x), list(ops.shape(other))
    for axis, size in enumerate(x.shape):
        if size != 1:
            shape[added + axis] = own[axis]
    return ops.broadcast_to(x, shape)
