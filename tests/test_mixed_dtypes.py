"""Layers of the user's that mix dtypes are kept in float32 at their first call."""

import functools
import math
import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops
from products import products_of

import keras_mp

BACKEND = keras.backend.backend()
# Keras multiplies float16 in float32 on torch's CPUs.
HALF = "bfloat16" if BACKEND == "torch" else "float16"
X = np.linspace(-1, 1, 32, dtype="float32").reshape(8, 4)
Y = X[:, :2]
promotes = pytest.mark.skipif(
    BACKEND != "tensorflow", reason="JAX and torch promote float16 with float32"
)


@pytest.fixture(autouse=True)
def under_the_policy():
    with keras_mp.policy_scope(f"mixed_{HALF}"):
        yield


class Sampling(layers.Layer):
    """As in Keras' guide of the variational autoencoder."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_var = inputs
        noise = keras.random.normal(
            ops.shape(mean), dtype="float32", seed=self.seed_generator
        )
        return mean + ops.exp(0.5 * log_var) * noise


class Masked(layers.Layer):
    def call(self, x):
        return x * ops.cast(x > 0, "float32")


class Spectrum(layers.Layer):
    """The mixing of FNet."""

    def call(self, x):
        real, _ = ops.fft2((x, ops.zeros_like(x)))
        return real


class Mixing(layers.Layer):
    """What a second call would do again; without `build`, for which Keras tries it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(4)
        self.index = keras.Variable(np.arange(4), dtype="int32", trainable=False)
        tenth = keras.initializers.Constant(0.1)  # In half precision it is another.
        self.count = self.add_weight(shape=(), initializer=tenth, trainable=False)
        # In a step of JAX Keras gives the metrics of layers no values.
        self.means = [keras.metrics.Mean(name="mean")] * (BACKEND != "jax")

    def call(self, x):
        self.count.assign_add(1.0)
        for mean in self.means:
            mean.update_state(ops.cast(ops.mean(x), "float32"))
        self.add_loss(1.0 + ops.mean(self.dense.kernel if self.dense.built else x) * 0)
        x = self.dense(ops.take(x, self.index, axis=-1))
        return x + ops.fft2((x, ops.zeros_like(x)))[0]

    def compute_output_shape(self, shape):
        return shape


class Built(Mixing):
    """Its first call is not one that Keras tries."""

    def build(self, shape):
        self.dense.build(shape)


def sinusoidal_embedding(x):
    """As in Keras' example of DDIM: angles in float32, whatever `x` is."""
    frequencies = ops.exp(ops.linspace(ops.log(1.0), ops.log(100.0), 4))
    angles = ops.cast(2.0 * math.pi * frequencies, "float32")
    return ops.concatenate([ops.sin(angles * x), ops.cos(angles * x)], axis=3)


def denoiser():
    """The network of Keras' example of DDIM, with two levels of 8 and 16 channels."""

    def residual(x, width):
        skip = x if x.shape[3] == width else layers.Conv2D(width, 1)(x)
        x = layers.BatchNormalization(center=False, scale=False)(x)
        x = layers.Conv2D(width, 3, padding="same", activation="swish")(x)
        x = layers.Conv2D(width, 3, padding="same")(x)
        return layers.Add()([x, skip])

    images, variances = keras.Input((8, 8, 3)), keras.Input((1, 1, 1))
    e = layers.Lambda(sinusoidal_embedding, name="embedding")(variances)
    e = layers.UpSampling2D(8, interpolation="nearest")(e)
    x = layers.Concatenate()([layers.Conv2D(8, 1)(images), e])
    x = skip = residual(x, 8)
    x = residual(layers.AveragePooling2D(2)(x), 16)
    x = layers.UpSampling2D(2, interpolation="bilinear")(x)
    x = residual(layers.Concatenate()([x, skip]), 8)
    noise = layers.Conv2D(3, 1, kernel_initializer="zeros")(x)
    return keras.Model([images, variances], noise)


def autoencoder():
    inputs = keras.Input((4,))
    x = layers.Dense(8, activation="relu")(inputs)
    z = Sampling(name="sampling")([layers.Dense(2)(x), layers.Dense(2)(x)])
    return keras.Model(inputs, layers.Dense(2)(layers.Dense(8)(z)))


def told(call, *args):
    """What a call returns, and what it says of mixed dtypes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call(*args)
    said = [str(w.message) for w in caught]
    return result, [m for m in said if "mixes dtypes" in m]


@promotes
def test_the_sampling_of_keras_guide_trains_and_all_products_stay_half():
    model, (message,) = told(autoencoder)
    assert message.startswith("sampling mixes dtypes in half precision")
    assert "@keras_mp.keep_float32" in message
    model.compile("adam", "mse")
    before = [np.array(w) for w in model.trainable_weights]
    assert not told(lambda: model.fit(X, Y, epochs=2, verbose=0))[1]
    for weight, start in zip(model.trainable_weights, before, strict=True):
        assert (np.array(weight) != start).any()
    assert model.get_layer("sampling").compute_dtype == "float32"
    # Five Dense layers: the last one is the output and float32.
    products = products_of(model, X, Y)
    assert products["float16"] >= 11 and products["float32"] == 3
    (row,) = [r for r in keras_mp.inspect(model).layers if r.path == "sampling"]
    assert "mixes dtypes" in str(row)


@promotes
def test_a_mask_in_float32_is_no_reason_to_stop():
    layer = Masked()
    _, (message,) = told(layer, X)
    assert message.startswith(f"{layer.path} mixes dtypes")
    np.testing.assert_array_equal(layer(X), np.maximum(X, 0))
    assert not told(layer, X)[1]


def test_a_fourier_transform_of_half_tensors_is_made_in_float32():
    layer = Spectrum()
    x = np.stack([X, X[::-1]])
    told(layer, x)
    assert layer.compute_dtype == "float32"
    np.testing.assert_allclose(layer(x), np.fft.fft2(x).real, atol=1e-5)


@promotes
def test_a_lambda_in_a_graph_is_kept_in_float32_as_a_layer_is():
    inputs = keras.Input((1, 1, 1))
    embed = layers.Lambda(sinusoidal_embedding, name="embedding")
    embedded, (message,) = told(embed, inputs)
    assert message.startswith("embedding mixes dtypes in half precision")
    # Not on the class, which is that of every Lambda.
    assert '`dtype="float32"` on the Lambda' in message
    assert embed.compute_dtype == embedded.dtype == "float32"
    x = X.reshape(32, 1, 1, 1)
    angles = 2 * math.pi * np.geomspace(1, 100, 4) * x
    np.testing.assert_allclose(
        keras.Model(inputs, embedded)(x),
        np.concatenate([np.sin(angles), np.cos(angles)], axis=3),
        atol=1e-3,
    )


def test_a_lambda_that_fails_in_float32_too_raises_kerass_error_and_stays_half():
    def wrong(x):
        raise ValueError("dtype or not, this function is wrong")

    layer = layers.Lambda(wrong)
    with pytest.raises(NotImplementedError, match="output_shape"):
        layer(keras.Input((4,)))
    assert layer.compute_dtype == HALF


@pytest.mark.slow("A whole program; its parts have tests of their own.")
def test_the_denoiser_of_kerass_ddim_trains_as_in_float32():
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(16, 8, 8, 3)).astype("float32")
    variances = rng.uniform(size=(16, 1, 1, 1)).astype("float32")
    images = np.sqrt(1 - variances) + np.sqrt(variances) * noise

    def losses(policy):
        keras.utils.set_random_seed(0)
        with keras_mp.policy_scope(policy):
            model, _ = told(denoiser)
        model.compile(keras.optimizers.Adam(1e-2), "mse")
        fit = model.fit(
            [images, variances], noise, batch_size=8, epochs=4, shuffle=False, verbose=0
        )
        if policy != "float32":
            products = products_of(model, [images, variances], noise)
            assert products[HALF] > products["float32"]
        return fit.history["loss"]

    expected = losses("float32")
    assert expected[-1] < 0.75 * expected[0]
    rounding = 0.05 if HALF == "bfloat16" else 0.01
    np.testing.assert_allclose(losses(f"mixed_{HALF}"), expected, rtol=rounding)


class Projected(layers.Layer):
    """As the attention of KerasHub: Keras knows its shapes without a call."""

    def build(self, input_shape):
        self.inner = Projection(name="inner")
        self.inner.build(input_shape)

    def call(self, inputs):
        return self.inner(inputs)

    def compute_output_shape(self, input_shape):
        return input_shape


class Projection(layers.Layer):
    def build(self, input_shape):
        self.project = layers.EinsumDense("abc,cd->abd", (None, input_shape[-1]))
        self.project.build(input_shape)

    def call(self, inputs):
        return self.project(inputs)


def test_a_layer_stays_half_where_only_shapes_are_asked_for():
    # On torch "meta" tensors are half there, and variables float32: EinsumDense fails.
    x = X.reshape(8, 2, 2)
    inputs = keras.Input((2, 2))
    outputs = layers.Dense(4)(layers.Flatten()(Projected(name="outer")(inputs)))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    model.fit(x, X, verbose=0)
    dtypes = {layer.compute_dtype for layer in model.layers[1]._flatten_layers()}
    assert dtypes == {HALF}


@promotes
def test_a_layer_inside_another_is_kept_and_the_other_is_not():
    class Block(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense, self.mask = layers.Dense(3), Masked()

        def call(self, x):
            return self.mask(self.dense(x))

    block = Block()
    assert len(told(block, X)[1]) == 1
    assert block.mask.compute_dtype == "float32"
    assert block.dense.compute_dtype == block.compute_dtype == "float16"


WAYS = {
    "fit": lambda model, x: model.fit(x, x, batch_size=4, verbose=0).history,
    "eager fit": lambda model, x: fitted_eagerly(model, x),
    "train_on_batch": lambda model, x: model.train_on_batch(x, x, return_dict=True),
    "call": lambda model, x: ops.convert_to_numpy(model(x)),
}


def fitted_eagerly(model, x):
    model.compile("sgd", "mse", run_eagerly=BACKEND != "torch")
    return WAYS["fit"](model, x)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("has_input", [True, False])
@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("kind", [Mixing, Built])
def test_what_a_call_that_fails_has_changed_is_taken_back(way, has_input, within, kind):
    class Around(layers.Layer):
        def __init__(self, layer):
            super().__init__(dtype="float32")
            self.inner = layer

        def call(self, x):
            return self.inner(x)

    def run():
        keras.utils.set_random_seed(0)
        mixing = kind(name="mixing")
        first = [keras.Input((2, 4))] if has_input else []
        layer = Around(mixing) if within else mixing
        model = keras.Sequential([*first, layer])
        model.compile("sgd", "mse")
        result = WAYS[way](model, np.resize(X, (8, 2, 4)))
        changed = mixing.count, *mixing.metrics_variables
        return result, [*map(ops.convert_to_numpy, changed)]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result, changed = run()
    said = {str(w.message) for w in caught if w.category is UserWarning}
    # None of Keras', which tries to build.
    assert len(said) == 1 and "mixing mixes dtypes" in said.pop(), said
    with keras_mp.policy_scope("float32"):
        expected, changes = run()
    keras.tree.map_structure(np.testing.assert_array_equal, result, expected)
    keras.tree.map_structure(np.testing.assert_array_equal, changed, changes)


@pytest.mark.parametrize(
    ("kind", "tried"),
    [
        (ValueError, [HALF, "float32", HALF]),  # The last one raises it as Keras does.
        # No framework raises these for dtypes.
        (KeyError, [HALF]),
        (AttributeError, [HALF]),
        (ZeroDivisionError, [HALF]),
    ],
)
def test_an_error_that_float32_does_not_mend_is_left_as_it_is(kind, tried):
    calls = []

    class Wrong(layers.Layer):
        def call(self, x):
            calls.append(self.compute_dtype)
            raise kind("dtype or not, this layer is wrong")

    layer = Wrong()
    with pytest.raises(kind, match="this layer is wrong") as caught:
        layer(X)
    assert not getattr(caught.value, "__notes__", None)
    assert calls == tried and layer.compute_dtype == HALF


@promotes
def test_without_a_policy_of_ours_nothing_is_caught():
    layer = Masked(dtype=keras.DTypePolicy("mixed_float16"))
    with pytest.raises(Exception, match="half"):
        layer(X)


@promotes
def test_a_reopened_model_has_the_layer_in_float32(tmp_path):
    told(autoencoder)[0].save(tmp_path / "model.keras")
    reopened = keras.saving.load_model(
        tmp_path / "model.keras", custom_objects={"Sampling": Sampling}
    )
    assert reopened.get_layer("sampling").dtype_policy.name == "float32"


# Keras' own layers that run code of the user's ---------------------------------------


def with_constants(x):
    """An activation that makes a float32 constant with the backend's own operations."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return x * tf.constant(0.5)
    if BACKEND == "jax":
        import jax

        return jax.lax.mul(x, jax.numpy.full(x.shape, 0.5, "float32"))
    import torch

    return torch.nn.functional.linear(x, torch.eye(x.shape[-1]) * 0.5)


class Cell(layers.Layer):
    """Its state is float32, whatever it computes in."""

    state_size = output_size = 4

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 4))

    def get_initial_state(self, batch_size=None):
        return [ops.zeros((batch_size, 4), "float32")]

    def call(self, x, states):
        product = ops.cast(ops.matmul(x, self.kernel), "float32")
        state = states[0] + product
        return state, [state]


SEQUENCE = layers.Reshape((2, 2))
OWN = {
    "Dense": lambda: [layers.Dense(4, activation=with_constants)],
    "partial": lambda: [
        layers.Dense(4, activation=functools.partial(with_constants)),
    ],
    "Conv1D": lambda: [SEQUENCE, layers.Conv1D(4, 2, activation=with_constants)],
    "Activation": lambda: [layers.Activation(with_constants)],
    "SimpleRNN": lambda: [SEQUENCE, layers.SimpleRNN(4, activation=with_constants)],
    "GRU": lambda: [SEQUENCE, layers.GRU(4, activation=with_constants)],
    "LSTM": lambda: [SEQUENCE, layers.LSTM(4, recurrent_activation=with_constants)],
    "TimeDistributed": lambda: [
        SEQUENCE,
        layers.TimeDistributed(layers.Dense(4, activation=with_constants)),
    ],
    "RNN": lambda: [SEQUENCE, layers.RNN(Cell())],
}


def own_model(name, kind):
    made = [*OWN[name](), layers.Flatten(), layers.Dense(2)]
    if kind == "sequential":
        return keras.Sequential(made)
    inputs = x = keras.Input((4,))
    for layer in made:
        x = layer(x)
    return keras.Model(inputs, x)


@pytest.mark.parametrize("kind", ["functional", "sequential"])
@pytest.mark.parametrize("name", OWN)
@pytest.mark.sampled
def test_layers_of_keras_that_run_the_users_code_train_as_in_float32(name, kind):
    def losses():
        keras.utils.set_random_seed(0)
        model = own_model(name, kind)
        model.compile("sgd", "mse")
        return model, model.fit(X, Y, epochs=2, verbose=0).history["loss"]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, found = losses()
    with keras_mp.policy_scope("float32"):
        _, wanted = losses()
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[HALF]
    np.testing.assert_allclose(found, wanted, rtol=6 * 8**0.5 * unit)
    said = [str(w.message) for w in caught if "mixes dtypes" in str(w.message)]
    if (BACKEND, name) == ("torch", "RNN"):
        assert said == []  # torch promotes.
        return
    (message,) = said
    # On torch, which promotes, a cell alone.
    own = [
        x for x in model._flatten_layers() if f"on the {type(x).__name__}," in message
    ]
    assert {x.compute_dtype for x in own[:1]} == {"float32"}
