"""The steps of a train function on TensorFlow, one batch at a time."""

import itertools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


def run_by_batch(
    train_function: Callable, args: Any, count: int, before: Callable, after: Callable
) -> Any:
    """See `Engine.run_by_batch`."""
    (iterator,) = args
    if not isinstance(iterator, tf.data.Iterator):
        return train_function(iterator)  # Not that of `fit`.
    batches = list(itertools.islice(iterator, count))
    if not batches:
        return train_function(iterator)  # Which says that there are no more.
    for batch in batches:
        before(keras.tree.map_structure(_value, batch), None)
        # An iterator of the same specification, or the function is traced anew, for
        # the shape of this batch.
        variant = tf.data.experimental.to_variant(tf.data.Dataset.from_tensors(batch))
        alone = tf.data.experimental.from_variant(variant, iterator.element_spec)
        logs = train_function(iter(alone))
        after(None)
    return logs


def _value(x: Any) -> Any:
    # How Keras passes a None through tf.data.
    return None if isinstance(x, tf.experimental.Optional) else x
