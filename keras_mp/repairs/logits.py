"""Tells the loss that what it reads are the logits of a head."""

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_mp.backends.known import known_tensors


class Head:
    """Logits that a head returned and made in an unknown way."""


# What is known of logits: a `Head`, or more where kernels are in.
noted = known_tensors("logits")
known, note = noted.get, noted.note


def of_heads(original: Callable) -> Callable:
    """Wraps the call of a head: what it returns are logits."""

    @functools.wraps(original)
    def call(*args: Any) -> Any:
        outputs = original(*args)
        for output in keras.tree.flatten(outputs):
            if ops.is_tensor(output) and known(output) is None:
                note(output, Head())
        return outputs

    return call
