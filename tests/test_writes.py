"""What a layer writes into its variables within a call in half precision is there."""

import keras
import numpy as np
import pytest
from backends import values
from keras import layers

import keras_mp


class Counts(layers.Layer):
    """Counts its calls in a weight, as a moving average would."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        return x + 0 * self.calls


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("chosen_by", ["keras_mp", "keras"])
def test_a_counter_counts(policy, chosen_by):
    if chosen_by == "keras":
        policy = keras.DTypePolicy(policy)
    keras_mp.set_global_policy(policy)
    model = keras.Sequential([layers.Dense(3), Counts()])
    x = np.ones((2, 3), "float32")
    for _ in range(3):
        model(x)
    assert values([model.layers[1].calls]) == [3.0]
    assert model.layers[1].calls.dtype == "float32"


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_stateful_lstm_has_a_state(policy):
    x = np.random.default_rng(0).normal(size=(2, 5, 3)).astype("float32")
    found = {}
    for name in ("float32", policy):
        keras_mp.set_global_policy(name)
        keras.utils.set_random_seed(0)
        layer = layers.LSTM(4, stateful=True)
        model = keras.Sequential([keras.Input(batch_shape=(2, 5, 3)), layer])
        found[name] = values([model(x), model(x)])
    first, second = found["float32"]
    assert np.abs(second - first).max() > 0.01
    np.testing.assert_allclose(found[policy], found["float32"], atol=0.01)
