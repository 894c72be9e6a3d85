"""`keras.RematScope`: what is computed again for gradients is half precision again."""

import keras
import numpy as np
import pytest
from backends import BACKEND, POLICIES
from keras import layers, ops

import keras_mp

pytestmark = pytest.mark.usefixtures("installed")

X = np.random.default_rng(0).normal(size=(8, 6, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(8, 3)).astype("float32")
# TensorFlow's graphs take no keyword, such as `training`, in what is computed again.
EAGERLY = BACKEND == "tensorflow"
ROUNDING = {"float16": 0.01, "bfloat16": 0.05}


class Attention(layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 3)

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return self.attention(x, x)


KINDS = {
    "Dense": lambda: layers.Dense(5, activation="gelu"),
    "Conv1D": lambda: layers.Conv1D(5, 3, activation="relu"),
    "SeparableConv1D": lambda: layers.SeparableConv1D(4, 2, activation="relu"),
    "BatchNormalization": layers.BatchNormalization,
    "LayerNormalization": layers.LayerNormalization,
    "LSTM": lambda: layers.LSTM(5, return_sequences=True),
    "Bidirectional": lambda: layers.Bidirectional(layers.GRU(3, return_sequences=True)),
    "attention": Attention,
    "softmax": lambda: layers.Dense(4, activation="softmax"),
}
# Those that Keras cannot train in every scope, in float32 either.
RECURRENT = ("LSTM", "Bidirectional")
NOT_IN_KERAS = {
    "torch": {"full": (), "activations": RECURRENT},
    "tensorflow": {"full": ("attention",), "activations": RECURRENT},
    "jax": {"full": (*RECURRENT, "BatchNormalization"), "activations": RECURRENT},
}[BACKEND]
CASES = [
    (k, mode)
    for mode, not_there in NOT_IN_KERAS.items()
    for k in KINDS
    if k not in not_there
]


def losses(policy, make, scope, weights=None):
    keras.utils.set_random_seed(0)
    keras_mp.set_global_policy(policy)
    with keras.RematScope(**scope):  # The layers remember it.
        parts = [make(), layers.Flatten(), layers.Dense(3)]
    model = keras.Sequential([keras.Input(X.shape[1:]), *parts])
    if weights is not None:
        model.set_weights(weights)
    start = model.get_weights()
    model.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=EAGERLY)
    fitted = model.fit(X, Y, epochs=3, shuffle=False, verbose=0)
    return fitted.history["loss"], start


@pytest.mark.parametrize("policy", [*POLICIES, "bfloat16"])
@pytest.mark.parametrize(("kind", "mode"), CASES)
@pytest.mark.sampled
def test_a_model_trains_as_in_float32(kind, mode, policy):
    wanted, weights = losses("float32", KINDS[kind], {"mode": mode})
    found, _ = losses(policy, KINDS[kind], {"mode": mode}, weights)
    rounding = ROUNDING[POLICIES.get(policy, "bfloat16")]
    np.testing.assert_allclose(found, wanted, rtol=rounding)


@pytest.mark.skipif(EAGERLY, reason="see NOT_IN_KERAS: it is `attention` in a graph")
@pytest.mark.parametrize("policy", ["float32", *POLICIES])
def test_every_kernel_moves_in_each_of_several_models(policy):
    """JAX took what it had traced while Keras built the model: gradients were 0."""
    keras_mp.set_global_policy(policy)
    for _ in range(3):
        with keras.RematScope(mode="full"):
            parts = [Attention(), layers.Flatten(), layers.Dense(3)]
        model = keras.Sequential([keras.Input(X.shape[1:]), *parts])
        before = model.get_weights()
        model.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=EAGERLY)
        model.fit(X, Y, verbose=0)
        for variable, value in zip(model.weights, before, strict=True):
            if variable.name == "kernel":
                assert np.any(ops.convert_to_numpy(variable) != value), variable.path


@pytest.mark.skipif(BACKEND != "torch", reason="elsewhere no Python runs twice")
def test_the_second_run_reads_the_weights_as_the_first_did():
    seen = []

    class Looks(layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], 4))

        def call(self, x):
            kernel = ops.convert_to_tensor(self.kernel)
            seen.append(keras.backend.standardize_dtype(kernel.dtype))
            return ops.matmul(x, kernel)

    losses("mixed_bfloat16", Looks, {"mode": "full"})
    *_, wanted, again = seen  # The first calls were those of float32.
    assert len(seen) >= 6 and wanted == again == "bfloat16"


def test_a_function_of_the_users_own_is_computed_again_as_well():
    class Block(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(4)

        def build(self, shape):
            self.dense.build(shape)
            self.again = keras.remat(self.dense.call)

        def call(self, x):
            return self.again(x)

    wanted, weights = losses("float32", Block, {"mode": "activations"})
    for policy in ("mixed_float16", "mixed_bfloat16"):
        found, _ = losses(policy, Block, {"mode": "activations"}, weights)
        rounding = ROUNDING[POLICIES[policy]]
        np.testing.assert_allclose(found, wanted, rtol=rounding)
