"""A decoder block on one device of JAX, and with its heads on two each."""

import json

import keras
import numpy as np
from distributions import distribution
from keras import layers

import keras_mp

RANDOM = np.random.default_rng(0)
IDS = RANDOM.integers(0, 32, (8, 16))


def trained():
    keras.utils.set_random_seed(0)
    with keras_mp.policy_scope("mixed_bfloat16"):
        ids = keras.Input((16,), dtype="int32")
        x = layers.Embedding(32, 32)(ids)
        attention = layers.MultiHeadAttention(4, 8, name="attention")
        x = x + attention(x, x, use_causal_mask=True)
        model = keras.Model(ids, layers.Dense(32, name="head")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss)
    fitted = model.fit(IDS, IDS, epochs=4, shuffle=False, verbose=0, batch_size=8)
    kernel = attention.query_dense.kernel.value
    return fitted.history["loss"], kernel.sharding.shard_shape(kernel.shape)


def main():
    found = {"one": trained()}
    split = distribution("model", ".*(query|key|value).kernel.*", (None, "model", None))
    keras.distribution.set_distribution(split)
    found["split"] = trained()
    print(json.dumps(found))


main()
