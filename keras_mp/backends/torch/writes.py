"""Writes to variables on torch: to sharded ones, and in a half-precision layer's call.

In such a call Keras copies the new value into `variable.value`, which is a copy in half
precision: the write is lost silently. A counter stays at 0, and a stateful LSTM never
has a state.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

import keras_mp.keras_private as private
from keras_mp.backends.torch import sharding


def reach_the_variable(original: Callable) -> Callable:
    """Writes into the variable if its `value` is a copy in another dtype."""

    @functools.wraps(original)
    def write(self: Any, value: Any) -> None:
        if sharding.write(self, value):
            return None
        raw = private.raw_value(self)
        if raw is None or self.value.dtype == raw.dtype:
            return original(self, value)
        with torch.no_grad():
            raw.copy_(value)

    return write
