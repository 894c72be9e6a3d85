"""Writes to variables on torch: of sharded ones, and within a layer's call in half.

There Keras copies the new value into `variable.value`, which is a copy in half
precision: the write is lost without a word. A counter stays at 0, and a stateful LSTM
never has a state.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

import keras_mp.keras_private as private
from keras_mp.backends.torch import sharding


def reach_the_variable(original: Callable) -> Callable:
    """Writes into the variable where `value` is a copy of another dtype."""

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
