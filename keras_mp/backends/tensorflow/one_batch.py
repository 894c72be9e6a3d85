"""One batch of those that a train function takes, on TensorFlow."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


def only(batch: Any, iterator: Any) -> Any:
    """See `Engine.only`."""
    # An iterator of the same specification, or the function is traced anew, for the
    # shape of this batch.
    variant = tf.data.experimental.to_variant(tf.data.Dataset.from_tensors(batch))
    return iter(tf.data.experimental.from_variant(variant, iterator.element_spec))


def show(before: Callable, batch: Any, state: Any) -> None:
    """Calls `before` with what is in a batch: Keras passes a None in an Optional."""

    def value(x: Any) -> Any:
        return None if isinstance(x, tf.experimental.Optional) else x

    before(keras.tree.map_structure(value, batch), state)
