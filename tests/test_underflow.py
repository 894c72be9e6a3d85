"""What loss scaling is for: gradients that float16 cannot hold."""

import keras
import numpy as np

import keras_mp

layers = keras.layers
DEPTH = 10


def first_kernel_moves(policy, **how):
    """How far the first kernel of a deep sigmoid net moves in training."""
    keras.utils.set_random_seed(2)
    with keras_mp.policy_scope(policy):
        model = keras.Sequential([keras.Input((4,))])
        # From zero, so that float32 itself does not round the small steps away.
        model.add(layers.Dense(4, activation="sigmoid", kernel_initializer="zeros"))
        for _ in range(DEPTH - 1):
            # A sigmoid passes on a quarter of a gradient at most.
            model.add(layers.Dense(4, activation="sigmoid"))
        model.add(layers.Dense(1))
    x = np.random.default_rng(3).normal(size=(32, 4)).astype("float32")
    y = np.full((32, 1), 0.5, "float32")
    model.compile(keras.optimizers.SGD(0.1), "mse", **how)
    model.fit(x, y, batch_size=32, epochs=4, shuffle=False, verbose=0)
    return model.layers[0].kernel.numpy().astype("float64")


def test_the_first_kernel_stands_still_without_scaling_and_follows_float32_with_it():
    reference = first_kernel_moves("float32")
    assert np.all(reference != 0)
    assert not first_kernel_moves("mixed_float16", auto_scale_loss=False).any()
    moved = first_kernel_moves("mixed_float16")
    error = np.linalg.norm(moved - reference) / np.linalg.norm(reference)
    assert error < 0.02
