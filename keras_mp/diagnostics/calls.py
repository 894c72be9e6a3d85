"""The calls of layers, made otherwise for a while."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras


@contextlib.contextmanager
def calls_made_by(make: Callable[[Any, Callable, tuple, dict[str, Any]], Any]) -> Any:
    """Calls layers by `make(operation, call, args, kwargs)` for a while.

    The operations of a graph as well. A layer's own call ends in `Operation.__call__`,
    after the casts of its inputs.
    """
    original = vars(keras.Operation)["__call__"]

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return make(self, functools.partial(original, self), args, kwargs)

    try:
        keras.Operation.__call__ = __call__
        yield
    finally:
        keras.Operation.__call__ = original
