"""`evaluate` and `predict` leave a model its values if an exception ends them.

Keras takes the values out of the variables while they run, and has no `finally` there.
"""

import functools
from collections.abc import Callable
from typing import Any

from keras_mp.backends.batches import Batches
from keras_mp.backends.interface import Wrapper


def wrappers(batches: Batches) -> dict[str, Wrapper]:
    """Wrappers of methods of `keras.Model`, by their names."""
    return {
        "evaluate": _ends_with_values,
        "predict": _ends_with_values,
        **{
            f"make_{name}": functools.partial(_makes_kept, batches, name)
            for name in ("test_function", "predict_function")
        },
    }


def _ends_with_values(original: Callable) -> Callable:
    # A callback may raise between two steps.
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except BaseException:
            self.jax_state_sync()
            raise

    return run


def _makes_kept(batches: Batches, name: str, original: Callable) -> Callable:
    def make(self: Any, force: bool = False) -> None:
        before = getattr(self, name)
        original(self, force)
        made = getattr(self, name)
        if made is not before:
            # An eager step takes nothing, and interrupts need not wait for it.
            is_compiled = self.jit_compile and not self.run_eagerly
            step = batches.keeping_state(self, made) if is_compiled else made
            attaching = batches.attaching(self, step)
            setattr(self, name, functools.wraps(made)(attaching))

    return make
