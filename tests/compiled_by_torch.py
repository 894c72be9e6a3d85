"""A training that torch.compile compiles: breaks and graphs, losses, a skipped step.

The argument is "float32", for Keras without keras_mp, or "mixed_float16".
"""

import json
import sys

import keras
import numpy as np
from backends import same_bits, values
from keras import layers
from torch._dynamo.utils import counters

import keras_mp


class Own(keras.Sequential):
    """Its train step is not Keras': torch compiles it, and keras_mp traces nothing."""

    def train_step(self, data):
        return super().train_step(data)


def made(jit_compile):
    keras.utils.set_random_seed(0)
    model = Own(
        [
            keras.Input((6, 6, 3)),
            layers.Conv2D(8, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(4),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, jit_compile=jit_compile)
    return model


if __name__ == "__main__":
    policy = sys.argv[1]
    if policy == "float32":
        keras_mp.uninstall()
    else:
        keras_mp.set_global_policy(policy)
    x = np.random.default_rng(0).normal(size=(8, 6, 6, 3)).astype("float32")
    y = np.arange(8) % 4
    found = {}
    for name, jit_compile in {"compiled": True, "eager": False}.items():
        model = made(jit_compile)
        losses = [float(model.train_on_batch(x, y)) for _ in range(3)]
        if jit_compile:  # Before a skipped step, which adds its own.
            found["breaks"] = sum(counters["graph_break"].values())
            found["graphs"] = counters["stats"]["unique_graphs"]
        if policy != "float32":
            before = values(model.variables)
            model.train_on_batch(x + np.inf, y)
            found[f"{name}, no trace"] = same_bits(before, values(model.variables))
            found[f"{name}, skipped"] = int(model.optimizer.skipped_steps)
            losses.append(float(model.train_on_batch(x, y)))
        found[name] = losses
    print(json.dumps(found))
