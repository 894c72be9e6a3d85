"""cuDNN's LSTM in half precision, on JAX: in float32, where Keras asks for it."""

import keras
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("JAX's cuDNN has no LSTM in half precision", allow_module_level=True)

import jax
import numpy as np
from jax.experimental import rnn
from keras import layers

import keras_mp
import keras_mp.keras_private as private

X = np.random.default_rng(0).normal(size=(2, 5, 3)).astype("float32")


@pytest.fixture
def seen(monkeypatch):
    """The dtypes that cuDNN is called with, as if a GPU was there."""
    dtypes = []

    def on_cpus(x, h, c, weights, lengths, input_size, hidden_size, **options):
        dtypes.append({a.dtype.name for a in (x, h, c, weights)})
        bidirectional = options["bidirectional"]
        parts = rnn.unpack_lstm_weights(
            weights, input_size, hidden_size, 1, bidirectional
        )
        return rnn.lstm_ref(
            x, h, c, *parts, lengths, input_size, hidden_size, 1, 0.0, bidirectional
        )

    monkeypatch.setattr(rnn, "lstm", on_cpus)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    return dtypes


LAYERS = {
    "LSTM": lambda **o: layers.LSTM(4, **o),
    "backwards": lambda **o: layers.LSTM(4, go_backwards=True, **o),
    "sequences": lambda **o: layers.LSTM(4, return_sequences=True, **o),
    "Bidirectional": lambda **o: layers.Bidirectional(layers.LSTM(4, **o), **o),
}


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_cudnn_computes_in_float32_and_the_layer_returns_half(seen, name, policy):
    half = policy.removeprefix("mixed_")
    layer = LAYERS[name](dtype=keras_mp.Policy(policy))
    layer.build(X.shape)
    full = LAYERS[name](dtype="float32")
    full.build(X.shape)
    full.set_weights(layer.get_weights())
    result = layer(X.astype(half))
    assert seen and set.union(*seen) == {"float32"}
    assert keras.backend.standardize_dtype(result.dtype) == half
    rounding = 2.0 ** (-11 if half == "float16" else -8)
    np.testing.assert_allclose(
        np.asarray(result, "float32"), np.asarray(full(X)), atol=4 * rounding
    )


def test_the_weights_get_their_gradient_through_it(seen):
    with keras_mp.policy_scope("mixed_float16"):
        model = keras.Sequential([layers.LSTM(4), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    losses = model.fit(X, np.ones((2, 1)), epochs=3, verbose=0).history["loss"]
    assert seen and losses[-1] < losses[0] and np.isfinite(losses).all()
    assert int(model.optimizer.skipped_steps) == 0


def test_inspect_says_so():
    with keras_mp.policy_scope("mixed_float16"):
        model = keras.Sequential(
            [keras.Input((5, 3)), layers.LSTM(4), layers.Dense(4), layers.Dense(1)]
        )
    decided = [layer.decided_by for layer in keras_mp.inspect(model).layers]
    assert decided.count("policy; float32 in cuDNN") == 1


def test_elsewhere_keras_loops_in_half_precision():
    layer = layers.LSTM(4, dtype="mixed_float16")
    result = layer(X.astype("float16"))
    assert keras.backend.standardize_dtype(result.dtype) == "float16"
    with pytest.raises(NotImplementedError):
        weights = layer.cell.kernel, layer.cell.recurrent_kernel, layer.cell.bias
        state = np.zeros((2, 4), "float16")
        private.backend_rnn.lstm(
            X.astype("float16"),
            *(state, state, None, *weights),
            *(keras.activations.tanh, keras.activations.sigmoid),
        )
