"""Programs of other people, reduced: each trains in float16 as it does in float32.

Keras' examples of a variational autoencoder, of an actor and critic, and of a Deep and
Cross network, and its guide to loops of one's own. (The denoiser of DDIM stands in
`test_mixed_dtypes.py`.)
"""

import re
import warnings

import keras
import numpy as np
import pytest
from backends import BACKEND, gradients
from keras import layers, ops
from test_unwrapped import apply

import keras_mp

# What bfloat16 breaks of a program float16 breaks too, but for rounding.
COARSER = pytest.mark.slow("Each program trains under two policies; this is the other.")
POLICIES = ["mixed_float16", pytest.param("mixed_bfloat16", marks=COARSER)]
# How far a loss may be from float32's, relative to the largest of the training.
APART = {"mixed_float16": 0.01, "mixed_bfloat16": 0.05}

pytestmark = pytest.mark.parametrize("policy", POLICIES)


def agrees(program, policy):
    """Runs a program that returns losses under float32 and under a policy."""
    losses = {}
    for name in ("float32", policy):
        keras.utils.set_random_seed(3)
        keras_mp.set_global_policy(name)
        losses[name] = program()
    expected = np.array(losses["float32"])
    assert abs(expected[-1] - expected[0]) > APART[policy] * abs(expected[0])
    apart = np.abs(losses[policy] - expected) / np.abs(expected).max()
    assert apart.max() < APART[policy]


def number(loss):
    return float(ops.convert_to_numpy(ops.stop_gradient(loss)))


# A variational autoencoder --------------------------------------------------------

IMAGES = (np.random.default_rng(0).random((16, 8, 8, 1)) < 0.1).astype("float32")


class Sampling(layers.Layer):
    """Draws a code, as the example does it."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_var = inputs
        shape = ops.shape(mean)
        epsilon = keras.random.normal(shape=shape, seed=self.seeds)
        return mean + ops.exp(0.5 * log_var) * ops.cast(epsilon, mean.dtype)


class VAE(keras.Model):
    def __init__(self):
        super().__init__()
        inputs = keras.Input((8, 8, 1))
        x = layers.Conv2D(8, 3, activation="relu", strides=2, padding="same")(inputs)
        x = layers.Dense(16, activation="relu")(layers.Flatten()(x))
        mean, log_var = layers.Dense(2)(x), layers.Dense(2)(x)
        self.encoder = keras.Model(inputs, [mean, log_var, Sampling()([mean, log_var])])
        self.decoder = keras.Sequential(
            [
                layers.Dense(4 * 4 * 8, activation="relu"),
                layers.Reshape((4, 4, 8)),
                layers.Conv2DTranspose(
                    1, 3, activation="sigmoid", strides=2, padding="same"
                ),
            ]
        )

    def call(self, x, training=False):
        mean, log_var, code = self.encoder(x)
        return {"image": self.decoder(code), "mean": mean, "log_var": log_var}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
        reconstruction = keras.losses.binary_crossentropy(y, y_pred["image"])
        mean, log_var = y_pred["mean"], y_pred["log_var"]
        divergence = -0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var))
        return ops.mean(ops.sum(reconstruction, axis=(1, 2))) + ops.mean(
            ops.sum(divergence, axis=1)
        )


def variational_autoencoder():
    model = VAE()
    model(IMAGES)
    model.compile(keras.optimizers.Adam(0.01))
    if isinstance(model.optimizer, keras_mp.LossScaleOptimizer):
        # The loss is a sum over pixels: at the first scales steps are skipped.
        model.optimizer.dynamic_scale.assign(2.0**8)
    return model.fit(IMAGES, IMAGES, 16, epochs=6, verbose=0).history["loss"]


@pytest.mark.slow("A whole program; its parts have tests of their own.")
def test_a_variational_autoencoder(policy):
    agrees(variational_autoencoder, policy)


# An actor and a critic, in a loop ------------------------------------------------


def actor_and_critic():
    """Episodes of one length, whose actions and rewards are drawn beforehand."""
    draw = np.random.default_rng(0)
    inputs = keras.Input((4,))
    common = layers.Dense(32, activation="relu")(inputs)
    actor = layers.Dense(2, activation="softmax")(common)
    model = keras.Model(inputs, [actor, layers.Dense(1)(common)])
    optimizer = keras.optimizers.Adam(0.01)
    if model.layers[1].compute_dtype == "float16":
        optimizer = keras_mp.LossScaleOptimizer(optimizer)
    huber, losses = keras.losses.Huber(), []
    states = ops.convert_to_tensor(draw.normal(size=(10, 4)).astype("float32"))
    actions = ops.one_hot(draw.integers(0, 2, 10), 2)
    returns = draw.normal(size=(10,)).astype("float32").cumsum()[::-1].copy()
    returns = ops.convert_to_tensor((returns - returns.mean()) / returns.std())
    for _ in range(6):

        def loss_of():
            probabilities, values = model(states)
            values = ops.squeeze(values, -1)
            log_probabilities = ops.log(ops.sum(probabilities * actions, axis=-1))
            advantage = returns - values
            critic = huber(returns[:, None], values[:, None])
            return ops.sum(-log_probabilities * advantage) / 10 + critic

        def scaled():
            loss = loss_of()
            is_scaled = isinstance(optimizer, keras_mp.LossScaleOptimizer)
            return optimizer.scale_loss(loss) if is_scaled else loss

        losses.append(number(loss_of()))
        grads = gradients(scaled, model.trainable_variables)
        apply(optimizer, grads, model.trainable_variables)
    return losses


@pytest.mark.slow("A whole program; its parts have tests of their own.")
def test_an_actor_and_a_critic(policy):
    agrees(actor_and_critic, policy)


# The guide to loops of one's own -------------------------------------------------


def loop_of_the_guide():
    """With a metric, as the guide has it, and the two lines that scale the loss."""
    draw = np.random.default_rng(0)
    x = ops.convert_to_tensor(draw.normal(size=(64, 12)).astype("float32"))
    y = ops.convert_to_tensor(draw.integers(0, 5, 64))
    inputs = keras.Input((12,), name="digits")
    hidden = layers.Dense(32, activation="relu")(inputs)
    model = keras.Model(inputs, layers.Dense(5, name="predictions")(hidden))
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.Adam(1e-2))
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metric, losses = keras.metrics.SparseCategoricalAccuracy(), []
    for start in (0, 32) * 4:
        rows = slice(start, start + 32)

        def scaled(rows=rows):
            return optimizer.scale_loss(loss_fn(y[rows], model(x[rows])))

        grads = gradients(scaled, model.trainable_variables)
        apply(optimizer, grads, model.trainable_variables)
        logits = model(x[rows])
        metric.update_state(y[rows], logits)
        losses.append(number(loss_fn(y[rows], logits)))
    assert 0 <= float(metric.result()) <= 1
    return losses


def test_the_loop_of_the_guide(policy):
    agrees(loop_of_the_guide, policy)


# A Deep and Cross network on raw features ----------------------------------------

DRAW = np.random.default_rng(0)
RAW = (DRAW.random((64, 6)) * 7000).astype("float32")
KIND = DRAW.integers(0, 9, (64, 1))
COVER = (RAW[:, 0] > 3500).astype("int32")


def deep_and_cross():
    numbers, kind = keras.Input((6,)), keras.Input((1,), dtype="int32")
    embedded = layers.Flatten()(layers.Embedding(9, 4)(kind))
    features = layers.concatenate([numbers, embedded])
    cross = features
    for number in range(2):
        units = cross.shape[-1]
        cross = features * layers.Dense(units, name=f"cross{number}")(cross) + cross
    cross = layers.BatchNormalization()(cross)
    deep = layers.Dense(16)(features)
    deep = layers.ReLU()(layers.BatchNormalization()(deep))
    outputs = layers.Dense(2, activation="softmax")(layers.concatenate([cross, deep]))
    model = keras.Model([numbers, kind], outputs)
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    return model


def fit(model, **options):
    return model.fit(
        [RAW, KIND], COVER, 8, shuffle=False, verbose=0, **options
    ).history["loss"]


@pytest.mark.slow("A whole program; its parts have tests of their own.")
def test_a_deep_and_cross_network_on_raw_features(policy):
    """Its products pass 65504: float16 is told of early, and mended by what is said."""
    keras.utils.set_random_seed(3)
    expected = fit(deep_and_cross(), epochs=4)
    keras.utils.set_random_seed(3)
    keras_mp.set_global_policy(policy)
    model = deep_and_cross()
    keras_mp.set_global_policy("float32")
    if policy == "mixed_float16":
        start = model.get_weights()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(model, epochs=4)
        (said,) = [str(w.message) for w in caught if "skipped" in str(w.message)]
        assert said.endswith("print(keras_mp.diagnose(model, x, y))")
        model.set_weights(start)
        # It finds the product, and says what to run where one layer is not enough.
        report = keras_mp.diagnose(model, [RAW, KIND], COVER)
        assert re.match("multiply.* returns magnitudes of up to", report.sentences[0])
        assert "find_float32_layers(model, x, y)" in report.sentences[-1]
        if BACKEND == "jax":
            return  # Where it takes a quarter of a minute to compile what it tries.
        found = keras_mp.find_float32_layers(model, [RAW, KIND], COVER, verbose=0)
        keras_mp.convert(model, found.float32_policy)
    losses = fit(model, epochs=4)
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(losses[0], expected[0], rtol=0.1)
