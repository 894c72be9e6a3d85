"""One batch of those that a train function takes, on TensorFlow."""

from typing import Any

import keras
import tensorflow as tf


def contents(batch: Any) -> Any:
    def value(x: Any) -> Any:
        # How Keras passes a None through tf.data.
        return None if isinstance(x, tf.experimental.Optional) else x

    return keras.tree.map_structure(value, batch)


def only(batch: Any, iterator: Any) -> Any:
    if not isinstance(iterator, tf.data.Iterator):
        return iter([batch])  # Of `train_on_batch`, not of `fit`.
    # An iterator of the same specification, or the function is traced anew, for the
    # shape of this batch.
    variant = tf.data.experimental.to_variant(tf.data.Dataset.from_tensors(batch))
    return iter(tf.data.experimental.from_variant(variant, iterator.element_spec))
