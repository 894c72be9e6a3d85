"""What is computed again for a gradient is computed in the precision of the first run.

By then Keras has left the scope in which a half-precision layer reads its variables.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras_mp.keras_private as private


def in_its_precision(original: Callable) -> Callable:
    """Lets a rematerialized function read variables as where it is first called."""

    @functools.wraps(original)
    def remat(f: Callable) -> Callable:
        @functools.wraps(f)
        def called(*args: Any, **kwargs: Any) -> Any:
            dtype = private.autocast_dtype()

            # Another function each time: JAX keeps what it has traced of a function,
            # with the values that variables had then, and Keras gives it the `call` of
            # a layer again and again. Their gradients were 0.
            @functools.wraps(f)
            def run(*args: Any, **kwargs: Any) -> Any:
                scope = private.AutocastScope(dtype) if dtype else None
                with scope or contextlib.nullcontext():
                    return f(*args, **kwargs)

            return original(run)(*args, **kwargs)

        return called

    return remat
