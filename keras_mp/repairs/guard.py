"""Calls of an operation that no wrapper is for pass this one function."""

import functools
from collections.abc import Callable
from typing import Any

import keras

from keras_mp.backends import engine
from keras_mp.backends.interface import Wrapper
from keras_mp.backends.known import IN_USE


def guarded(half: Wrapper | None, heads: Wrapper | None) -> Wrapper:
    """Wraps an operation in the calls that a wrapper is for.

    Args:
        half: for calls with an operand in half precision.
        heads: for those by heads, or of what they have made; it comes first.
    """
    return functools.partial(_guarded, half, heads)


def _guarded(
    wrap_half: Wrapper | None, wrap_heads: Wrapper | None, original: Callable
) -> Callable:
    half_dtypes, variable = engine.half_dtypes, keras.Variable
    in_use = IN_USE if wrap_heads else []
    half = wrap_half(original) if wrap_half else None
    heads = wrap_heads(original) if wrap_heads else original

    def operation(*args: Any, **kwargs: Any) -> Any:
        if any(in_use):
            return heads(*args, **kwargs)
        if half is None:
            return original(*args, **kwargs)
        only_variables = True
        for x in (*args, *kwargs.values()):
            # To ask a variable for its dtype takes Keras some calls. It is half where
            # its layer is, and then so is the other operand.
            if not isinstance(x, variable):
                dtype = getattr(x, "dtype", None)
                if dtype in half_dtypes:
                    return half(*args, **kwargs)
                only_variables = only_variables and dtype is None
        return (half if only_variables else original)(*args, **kwargs)

    return operation
