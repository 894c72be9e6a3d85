"""Writes to variables on torch: to sharded ones, and in a half-precision layer's call.

Who must know of a write, because a skipped step takes it back, is told here.

In such a call Keras copies the new value into `variable.value`, which is a copy in half
precision: the write is lost silently. A counter stays at 0, and a stateful LSTM never
has a state.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

import keras_mp.keras_private as private
from keras_mp.backends.torch import sharding
from keras_mp.types import Tensor, Variable

# Of each thread: threads may train models that share variables.
_thread = threading.local()


@contextlib.contextmanager
def noted_by(note: Callable[[Any], None]) -> Iterator[None]:
    """Calls `note(variable)` before each write of this thread to a variable."""
    outer = getattr(_thread, "note", None)

    def both(variable: Variable) -> None:
        note(variable)
        if outer is not None:  # A step within a step.
            outer(variable)

    try:
        _thread.note = both
        yield
    finally:
        _thread.note = outer


def reach_the_variable(original: Callable) -> Callable:
    """Writes into the variable if its `value` is a copy in another dtype."""

    @functools.wraps(original)
    def write(self: Any, value: Tensor) -> None:
        note = getattr(_thread, "note", None)
        if note is not None:
            note(self)
        if sharding.write(self, value):
            return None
        raw = private.raw_value(self)
        if raw is None or self.value.dtype == raw.dtype:
            return original(self, value)
        with torch.no_grad():
            raw.copy_(value)

    return write
