"""Gives optimizers other methods for a while, instead of those of their classes."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras_mp.keras_private as private
from keras_mp.replaced import instead, replaced


@contextlib.contextmanager
def own_methods(methods: Iterable[tuple[Any, dict[str, Callable]]]) -> Iterator[None]:
    """Gives these methods to these optimizers, and to no other of their class."""
    with contextlib.ExitStack() as undone:
        for optimizer, new in methods:
            own = {name: instead(method) for name, method in new.items()}
            undone.enter_context(replaced("updates", optimizer, own))
        yield


def plain_updates(optimizers: Iterable[Any]) -> contextlib.AbstractContextManager:
    """Lets these Keras optimizers write with `assign`, as on any backend."""
    return own_methods((o, private.plain_methods(o)) for o in optimizers)
