"""A model with bfloat16 weights on one device of JAX and on all, printed as JSON."""

import json

import keras
import numpy as np
from distributions import distribution
from keras import layers

import keras_mp

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(128, 64)).astype("float32")
Y = X[:, :8].argmax(1)


def trained():
    keras.utils.set_random_seed(0)
    with keras_mp.policy_scope("bfloat16"):
        model = keras.Sequential(
            [
                keras.Input((64,)),
                layers.Dense(256, activation="relu", name="large"),
                layers.Dense(8, name="head"),
            ]
        )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss)
    fitted = model.fit(X, Y, epochs=4, shuffle=False, verbose=0)
    return model, fitted.history["loss"]


def shards(variable):
    """Of each part of it the copies on the devices; on one device a copy alone."""
    copies = {}
    for shard in variable.value.addressable_shards:
        copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
    return list(copies.values())


def main():
    found = {}
    for kind in ("one", "data", "model"):
        if kind != "one":
            # The layout is that of its slots, too.
            parted = distribution(kind, ".*large.kernel.*", (None, "model"))
            keras.distribution.set_distribution(parted)
        model, losses = trained()
        kernel = model.get_layer("large").kernel
        state = [v for v in model.optimizer.variables if "large_kernel" in v.path]
        found[kind] = {
            "losses": losses,
            "kernel": np.asarray(kernel.value, "float32").ravel().tolist(),
            "dtypes": sorted({str(v.value.dtype) for v in [kernel, *state]}),
            "parts": [len(shards(v)) for v in [kernel, *state]],
            "copies": sorted({len(c) for v in [kernel, *state] for c in shards(v)}),
            "differ": [
                v.path
                for v in [*model.variables, *model.optimizer.variables]
                for copies in shards(v)
                if any((copy != copies[0]).any() for copy in copies)
            ],
        }
    print(json.dumps(found))


main()
