"""What layers, and the operations of a graph, return on the way."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_mp.keras_seams.seams import calls_made_by


@contextlib.contextmanager
def results_through(pass_on: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Lets a model go on with `pass_on(operation, x)` where `operation` returned x.

    What is called at each step of a loop, the cell of an RNN, is left alone.
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
