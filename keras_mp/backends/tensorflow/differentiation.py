"""Gradients by what is computed on the way to a loss, on TensorFlow."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def differentiate(
    function: Callable, arguments: Any, variables: Any, state: Any, compiled: bool
) -> tuple[Any, list, list, list]:
    seen: list[Any] = []

    def see(x: Any) -> tuple[Any, bool]:
        # What stands in a graph of its own must not leave it.
        here = tf.executing_eagerly() and isinstance(x, tf.Tensor)
        if not (here and x.dtype.is_floating):
            return x, False
        seen.append(x)
        return x, True

    with tf.GradientTape() as tape:
        loss = function(arguments, see)
    found = tape.gradient(loss, [*(v.value for v in variables), *seen])
    # Sparse ones, of an Embedding, become dense.
    found = [None if g is None else tf.convert_to_tensor(g) for g in found]
    return loss, seen, found[len(variables) :], found[: len(variables)]
