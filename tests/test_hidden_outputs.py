"""The gradient of one output of a model in another: it is there, and it is float32's.

As Grad-CAM asks for it: a feature map, and the probabilities that are computed from it.
"""

import keras
import numpy as np
import pytest
from backends import BACKEND, POLICIES, dtype_of
from keras import layers, ops

import keras_mp
import keras_mp.keras_private as private
from keras_mp.policies import hidden

X = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype("float32")
ROUNDING = {"float16": 0.03, "bfloat16": 0.2}
asks = pytest.mark.skipif(
    BACKEND == "jax",
    reason="JAX has gradients of functions alone, so that no program can ask for it",
)


# Kinds of models -------------------------------------------------------------------


def trunk(x):
    return layers.Conv2D(8, 3, activation="relu")(layers.Conv2D(4, 3)(x))


def classes(x):
    x = layers.GlobalAveragePooling2D()(x)
    return layers.Dense(5, activation="softmax")(x)


def functional(made_by=lambda x: x, outputs=lambda x, y: [x, y]):
    inputs = keras.Input(X.shape[1:])
    features = made_by(trunk(inputs))
    return keras.Model(inputs, outputs(features, classes(features)))


def of_a_trained_one():
    inputs = keras.Input(X.shape[1:])
    features = trunk(inputs)
    probabilities = classes(features)
    model = keras.Model(inputs, probabilities)
    model.compile(keras.optimizers.SGD(1e-3), "sparse_categorical_crossentropy")
    model.fit(X, np.zeros(2), verbose=0)
    return keras.Model(inputs, [features, probabilities])


def of_a_sequential():
    parts = [layers.Conv2D(8, 3, activation="relu"), layers.GlobalAveragePooling2D()]
    last = layers.Dense(5, activation="softmax")
    model = keras.Sequential([keras.Input(X.shape[1:]), *parts, last])
    return keras.Model(model.inputs, [parts[0].output, last.output])


def base_and_head():
    inputs = keras.Input(X.shape[1:])
    base = keras.Model(inputs, trunk(inputs))
    again = keras.Input(X.shape[1:])
    features = base(again)
    return keras.Model(again, [features, classes(features)])


def both_within():
    inputs = keras.Input(X.shape[1:])
    features, probabilities = functional()(inputs)
    return keras.Model(inputs, [features, layers.Activation("linear")(probabilities)])


class Subclassed(keras.Model):
    def __init__(self, made_by=None):
        super().__init__()
        self.conv, self.made_by = layers.Conv2D(8, 3, activation="relu"), made_by
        self.pool = layers.GlobalAveragePooling2D()
        self.dense = layers.Dense(5, activation="softmax")

    def call(self, x):
        features = self.conv(x)
        if self.made_by is not None:
            features = self.made_by(features + 0.1)
        return {"x": features, "y": self.dense(self.pool(features))}


class Around(keras.Model):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        outputs = self.inner(x)
        return (outputs["x"], outputs["y"]) if isinstance(outputs, dict) else outputs


class Residual(Subclassed):
    """It mixes dtypes: TensorFlow does not promote."""

    def call(self, x):
        features = self.conv(x) * x[:, 1:-1, 1:-1, :1]
        return {"x": features, "y": self.dense(self.pool(features))}


def compiled(model):
    model.compile(keras.optimizers.SGD(1e-3), {"y": "sparse_categorical_crossentropy"})
    model.fit(X, {"y": np.zeros(2)}, verbose=0)
    return model


def called(model):
    model(X)
    return model


KINDS = {
    "Functional": functional,
    "Functional, dict": lambda: functional(outputs=lambda x, y: {"y": y, "x": x}),
    "Functional, made by an operation": lambda: functional(lambda x: ops.relu(x + 0.1)),
    "of a model that was trained": of_a_trained_one,
    "of a Sequential": of_a_sequential,
    "a model and a head": base_and_head,
    "a model with both": both_within,
    "subclassed": Subclassed,
    "subclassed, called before": lambda: called(Subclassed()),
    "subclassed, fitted": lambda: compiled(Subclassed()),
    "subclassed, Activation": lambda: Subclassed(layers.Activation("relu")),
    "subclassed in subclassed": lambda: Around(Subclassed()),
    "Functional in subclassed": lambda: called(Around(functional())),
    "subclassed, mixing dtypes": Residual,
}


# Their gradients -------------------------------------------------------------------


def features_and_gradient(model, traced):
    """The features, and the gradient of the score of a class in them."""

    def both(outputs):
        return (outputs["x"], outputs["y"]) if isinstance(outputs, dict) else outputs

    if BACKEND == "torch":
        import torch

        features, probabilities = both(model(torch.tensor(X)))
        return features, torch.autograd.grad(probabilities[:, 1].sum(), features)[0]
    import tensorflow as tf

    def run(x):
        with tf.GradientTape() as tape:
            features, probabilities = both(model(x))
            score = probabilities[:, 1]
        return features, tape.gradient(score, features)

    return (tf.function(run) if traced else run)(tf.constant(X))


def computed(kind, policy, traced):
    keras.utils.set_random_seed(0)
    keras_mp.set_global_policy(policy)
    results = features_and_gradient(KINDS[kind](), traced)
    assert results[1] is not None, "There is no gradient."
    assert [dtype_of(result) for result in results] == ["float32"] * 2
    assert not hidden.within
    return [ops.convert_to_numpy(ops.stop_gradient(result)) for result in results]


@asks
@pytest.mark.filterwarnings("ignore:.*mixes dtypes")
@pytest.mark.parametrize(
    "traced", [False, True] if BACKEND == "tensorflow" else [False]
)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled
def test_the_gradient_of_a_class_in_the_features_is_that_of_float32(
    kind, policy, traced
):
    found, wanted = computed(kind, policy, traced), computed(kind, "float32", traced)
    for a, b in zip(found, wanted, strict=True):
        assert np.max(np.abs(a - b)) < ROUNDING[POLICIES[policy]] * np.max(np.abs(b))


@asks
def test_handing_out_changes_no_value(mixed_float16, monkeypatch):
    model = functional()
    outputs = [ops.convert_to_numpy(ops.stop_gradient(x)) for x in model(X)]
    monkeypatch.setattr(hidden, "note_makers", lambda model: None)
    for a, b in zip(model(X), outputs, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(ops.stop_gradient(a)), b)


@asks
def test_what_is_handed_out_keeps_its_mask(mixed_float16):
    inputs = keras.Input((4,), dtype="int32")
    embedded = layers.Embedding(5, 3, mask_zero=True)(inputs)
    model = keras.Model(inputs, [embedded, layers.LSTM(2)(embedded)])
    ids = np.array([[1, 2, 0, 0], [3, 0, 0, 0]], "int32")
    first, _ = model(ids)
    np.testing.assert_array_equal(
        ops.convert_to_numpy(private.get_keras_mask(first)), ids != 0
    )


def test_an_error_within_a_call_leaves_no_mark(mixed_float16):
    class Fails(layers.Layer):
        fails = False

        def call(self, x):
            if self.fails:
                raise KeyboardInterrupt
            return x

    layer = Fails()
    model = functional(layer)
    model(X)
    layer.fails = True
    with pytest.raises(KeyboardInterrupt):
        model(X)
    assert not hidden.within


@pytest.mark.skipif(BACKEND != "jax", reason="jax.vjp is JAX's")
@pytest.mark.parametrize("policy", POLICIES)
def test_on_jax_the_gradient_of_both_outputs_is_that_of_float32(policy):
    import jax

    def gradients(policy):
        keras.utils.set_random_seed(0)
        keras_mp.set_global_policy(policy)
        model = functional()
        outputs, pull = jax.vjp(lambda x: tuple(model(x)), X)
        return [*outputs, *pull(tuple(ops.ones_like(x) for x in outputs))]

    for a, b in zip(gradients(policy), gradients("float32"), strict=True):
        assert a.dtype == "float32"
        assert np.max(np.abs(a - b)) < ROUNDING[POLICIES[policy]] * np.max(np.abs(b))
