"""Tells the loss that what it reads are the logits of a head."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import keras

from keras_mp.backends.known import IN_USE, Known
from keras_mp.types import Tensor


class Head:
    """Logits that a head returned and made in an unknown way."""


# What is known of logits: a `Head`, or more where kernels are in.
noted: Known[Any] = Known()
IN_USE.append(noted.facts)
known = noted.get


def note(tensor: Tensor, fact: Any) -> None:
    if isinstance(tensor, jax.Array):
        noted.note(tensor, fact)


def of_heads(original: Callable) -> Callable:
    """Wraps the call of a head: what it returns are logits."""

    @functools.wraps(original)
    def call(*args: Any) -> Any:
        outputs = original(*args)
        for output in keras.tree.flatten(outputs):
            if known(output) is None:
                note(output, Head())
        return outputs

    return call
