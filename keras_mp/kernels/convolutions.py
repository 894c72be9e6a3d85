"""After a convolution, a ReLU keeps its result alone for the gradient.

The next convolution keeps that anyway. Left to itself XLA takes the signs from the
input, and so writes and keeps both.
"""

import functools
from collections.abc import Callable
from typing import Any

from keras_mp.backends.interface import Wrapper, around
from keras_mp.backends.known import known_tensors
from keras_mp.types import Tensor

_OPERATIONS = "conv", "conv_transpose", "depthwise_conv"
_results = known_tensors("convolution")


# Compiled in float16 for an H100, and read as flops and bytes, VGG-16 takes 7.00 ms,
# not 7.66, in 0.79 of the memory. After a batch normalization a step takes more of
# both, as XLA computes the signs from what that keeps. After a dense layer nothing is
# gained: the product that reads the result computes it from the input. A leaky ReLU
# takes more time.
def kernels(
    others: dict[str, Wrapper],
    is_differentiated: Callable[[Tensor], bool],
    relu: Callable[[Tensor], Any],
) -> dict[str, Wrapper]:
    """Wrappers of convolutions and of `relu`; `passed_on` wraps what is between.

    Args:
        others: they go around these by the same name.
        is_differentiated: whether a gradient may be asked for by a half-precision
            tensor, in a program that XLA compiles.
        relu: the ReLU that keeps its result.
    """
    noted = functools.partial(_noted, is_differentiated)
    return {
        **others,
        **around(others, _OPERATIONS, noted),
        "relu": functools.partial(_relu_of_a_convolution, relu),
    }


def _noted(is_differentiated: Callable, original: Callable) -> Callable:
    @functools.wraps(original)
    def convolution(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if is_differentiated(result):
            _results.note(result, True)
        return result

    return convolution


def passed_on(original: Callable) -> Callable:
    """Wraps `add`: the sum of a convolution's result and a bias is such a result."""

    @functools.wraps(original)
    def add(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if _results.facts and any(map(_results.get, args)):
            _results.note(result, True)
        return result

    return add


def _relu_of_a_convolution(relu: Callable, original: Callable) -> Callable:
    @functools.wraps(original)
    def activation(x: Tensor) -> Any:
        return relu(x) if _results.get(x) else original(x)

    return activation
