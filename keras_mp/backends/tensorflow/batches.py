"""One batch at a time on TensorFlow, where a train function takes an iterator."""

from typing import Any

import keras
import tensorflow as tf

from keras_mp.backends.batches import Batches
from keras_mp.types import Model, Tensor

# For a dataset of one batch: optimizing it takes longer than reading it.
_AT_ONCE = tf.data.Options()
_AT_ONCE.autotune.enabled = False
_AT_ONCE.experimental_optimization.apply_default_optimizations = False


class TensorFlowBatches(Batches):
    """Replaces an iterator of tf.data by one over a single batch."""

    def contents(self, batch: Any) -> Any:
        def value(x: Tensor) -> Any:
            # Keras passes a None through tf.data this way.
            return None if isinstance(x, tf.experimental.Optional) else x

        return keras.tree.map_structure(value, batch)

    def only(self, batch: Any, iterator: Any, count: int) -> Any:
        if not isinstance(iterator, tf.data.Iterator):
            return iter([batch])  # From `train_on_batch`, not from `fit`.
        # The iterator has the same specification, or the function is traced again for
        # the shape of this batch.
        dataset = tf.data.Dataset.from_tensors(batch).with_options(_AT_ONCE)
        variant = tf.data.experimental.to_variant(dataset)
        return iter(tf.data.experimental.from_variant(variant, iterator.element_spec))

    def other_workers(self, model: Model) -> str:
        strategy = model.distribute_strategy
        if tf.distribute.has_strategy() or strategy is not tf.distribute.get_strategy():
            return f"a model under {type(strategy).__name__}"
        return ""
