"""Updates by which Keras' optimizers write each variable by its own `assign`."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from keras_mp.keras_seams import private


@contextlib.contextmanager
def plain_updates(optimizers: Iterable[Any]) -> Iterator[None]:
    """Lets these optimizers take the methods that all backends have, meanwhile."""
    with contextlib.ExitStack() as undone:
        for optimizer in optimizers:
            own = vars(optimizer)
            for name, method in private.plain_methods(optimizer).items():
                # In place of the methods of its class, and of this optimizer alone.
                own[name] = method
                undone.callback(own.pop, name)
        yield
