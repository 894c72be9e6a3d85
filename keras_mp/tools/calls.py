"""The calls of layers, made otherwise for a while."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_mp.replaced import replaced


@contextlib.contextmanager
def calls_made_by(make: Callable[[Any, Callable, tuple, dict[str, Any]], Any]) -> Any:
    """Calls layers by `make(operation, call, args, kwargs)` for a while.

    The operations of a graph as well. A layer's own call ends in `Operation.__call__`,
    after the casts of its inputs.
    """

    def made(original: Callable) -> Callable:
        @functools.wraps(original)
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            return make(self, functools.partial(original, self), args, kwargs)

        return __call__

    with replaced("calls", keras.Operation, {"__call__": made}):
        yield


@contextlib.contextmanager
def results_through(pass_on: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Replaces each x that an operation returns with `pass_on(operation, x)`.

    An operation is a layer or an operation of a graph. The cell of an RNN, which is
    called at each step of a loop, is left alone.
    """
    within_loop = False

    def make(operation: Any, call: Callable, args: tuple, kwargs: dict) -> Any:
        nonlocal within_loop
        if within_loop:
            return call(*args, **kwargs)
        within_loop = isinstance(operation, keras.layers.RNN)
        try:
            result = call(*args, **kwargs)
        finally:
            within_loop = False
        passed = functools.partial(pass_on, operation)
        return keras.tree.map_structure(passed, result)

    with calls_made_by(make):
        yield
