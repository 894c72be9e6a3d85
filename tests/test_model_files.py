"""Models that store one policy for all their layers, as KerasHub's do."""

import json
import zipfile

import keras
import numpy as np
import pytest

import keras_mp

layers = keras.layers
X = np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4)


@keras.saving.register_keras_serializable(package="tests")
class Backbone(keras.Model):
    """A Functional model that is created again from arguments of its own."""

    def __init__(self, units, dtype=None, **kwargs):
        super().__init__(*self.graph(units, dtype), **kwargs)
        self.units = units
        if dtype is not None:
            self.dtype_policy = keras.dtype_policies.get(dtype)

    def graph(self, units, dtype):
        inputs = keras.Input((4,))
        x = layers.Dense(units, name="hidden", dtype=dtype)(inputs)
        gate = layers.Dense(units, activation="softmax", name="gate", dtype=dtype)(x)
        return inputs, layers.Multiply(dtype=dtype)([x, gate])

    def get_config(self):
        dtype = keras.dtype_policies.serialize(self.dtype_policy)
        return {"units": self.units, "name": self.name, "dtype": dtype}

    @classmethod
    def from_config(cls, config):
        dtype = keras.dtype_policies.get(config.pop("dtype"))
        return cls(dtype=dtype, **config)


@keras.saving.register_keras_serializable(package="tests")
class Task(keras.Model):
    """A backbone with a head that has the backbone's policy."""

    def __init__(self, backbone, **kwargs):
        inputs = backbone.input
        head = layers.Dense(2, name="head", dtype=backbone.dtype_policy)
        super().__init__(inputs, head(backbone(inputs)), **kwargs)
        self.backbone = backbone
        self.dtype_policy = backbone.dtype_policy

    def get_config(self):
        return {"backbone": keras.layers.serialize(self.backbone), "name": self.name}

    @classmethod
    def from_config(cls, config):
        backbone = keras.layers.deserialize(config.pop("backbone"))
        return cls(backbone, **config)


def under_the_global_policy():
    with keras_mp.policy_scope("mixed_float16"):
        return Task(Backbone(8))


def with_a_dtype():
    return Task(Backbone(8, dtype=keras_mp.MixedFloat16()))


def converted():
    return keras_mp.convert(Task(Backbone(8)), "mixed_float16")


def precisions(model):
    names = ("hidden", "gate", "head")
    found = {layer.name: layer.compute_dtype for layer in model._flatten_layers()}
    return [found[name] for name in names if name in found]


@pytest.fixture(params=[under_the_global_policy, with_a_dtype, converted])
def model(request):
    return request.param()


def opened_twice(model, x, path):
    """A model from its file, and then from that as which this was saved."""
    y = model.predict(x, verbose=0)
    for _ in range(2):
        model.save(path)
        model = keras.models.load_model(path)
        np.testing.assert_array_equal(model.predict(x, verbose=0), y)
        yield model


@pytest.mark.parametrize("compiled", [False, True])
def test_it_opens_with_the_precision_that_each_layer_had(model, compiled, tmp_path):
    if compiled:
        model.compile("sgd", "mse")
        assert precisions(model) == ["float16", "float32", "float32"]
    before = precisions(model)
    for opened in opened_twice(model, X, tmp_path / "model.keras"):
        assert precisions(opened) == before


def test_a_backbone_that_was_never_called_stores_stock_policies_only(tmp_path):
    with keras_mp.policy_scope("mixed_bfloat16"):
        backbone = Backbone(8)
    backbone.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as file:
        config = file.read("config.json").decode()
    assert "keras_mp" not in config
    dtype = json.loads(config)["config"]["dtype"]
    assert dtype["class_name"] == "DTypePolicyMap"
    assert list(dtype["config"]["policy_map"]) == ["gate"]
    # As where keras_mp is missing.
    keras_mp.uninstall()
    opened = keras.models.load_model(tmp_path / "model.keras")
    assert precisions(opened) == ["bfloat16", "float32"]


def test_storing_leaves_the_model_as_it_was(model):
    before = [layer.dtype_policy for layer in model._flatten_layers()]
    model.get_config()
    after = [layer.dtype_policy for layer in model._flatten_layers()]
    assert all(a is b for a, b in zip(after, before, strict=True))


def test_quantized_layers_are_stored_as_what_they_are(tmp_path):
    # Keras quantizes no layer that computes in float16.
    model = keras_mp.convert(Task(Backbone(8)), "mixed_bfloat16")
    model.backbone.get_layer("hidden").quantize("int8")
    model.save(tmp_path / "model.keras")
    opened = keras.models.load_model(tmp_path / "model.keras")
    hidden = next(x for x in opened._flatten_layers() if x.name == "hidden")
    assert hidden.quantization_mode == "int8"


def test_without_the_seams_the_class_has_its_own_get_config_again(model):
    assert hasattr(Backbone.get_config, "__wrapped__")
    keras_mp.uninstall()
    assert not hasattr(Backbone.get_config, "__wrapped__")


def test_a_model_in_float32_stores_what_it_would_store_without_keras_mp():
    model = Backbone(8)
    assert model.get_config()["dtype"]["config"] == {"name": "float32"}


@keras.saving.register_keras_serializable(package="tests")
class Block(layers.Layer):
    """A layer of layers, of which the Dropout never has a path."""

    def build(self, shape):
        self.dense = layers.Dense(shape[-1], name="dense", dtype=self.dtype_policy)
        self.dense.build(shape)
        self.attention = layers.MultiHeadAttention(
            1, 4, dropout=0.1, name="attention", dtype=self.dtype_policy
        )
        self.attention.build(shape, shape)
        self.dropout = layers.Dropout(0.1, dtype=self.dtype_policy)

    def call(self, x):
        x = self.dropout(self.dense(x))
        return x + self.attention(x, x)


@keras.saving.register_keras_serializable(package="tests")
class Deep(Backbone):
    """Ends in a layer of layers."""

    def graph(self, units, dtype):
        inputs = keras.Input((3, 4))
        x = Block(name="first", dtype=dtype)(inputs)
        return inputs, Block(name="last", dtype=dtype)(x)


def test_a_layer_of_layers_is_kept_with_all_that_it_is_made_of(tmp_path):
    x = np.linspace(-1, 1, 24, dtype="float32").reshape(2, 3, 4)
    policy = keras_mp.MixedFloat16(float32=["last"])
    model = keras_mp.convert(Deep(8), policy)
    last = model.get_layer("last")
    assert {part.compute_dtype for part in last._flatten_layers()} == {"float32"}
    y = model.predict(x, verbose=0)
    path = tmp_path / "model.keras"
    for opened in opened_twice(model, x, path):
        last = opened.get_layer("last")
        assert {part.compute_dtype for part in last._flatten_layers()} == {"float32"}
        assert opened.get_layer("first").compute_dtype == "float16"
    # Where keras_mp is missing it is in half precision, with all its parts.
    keras_mp.uninstall()
    opened = keras.models.load_model(path)
    np.testing.assert_allclose(opened.predict(x, verbose=0), y, atol=0.01)


@keras.saving.register_keras_serializable(package="tests")
class Activated(Backbone):
    """Ends in a layer that never has a path, and holds another in a block."""

    def graph(self, units, dtype):
        inputs = keras.Input((4,))
        x = Gated(units, name="block", dtype=dtype)(inputs)
        return inputs, layers.ReLU(name="last", dtype=dtype)(x)


@keras.saving.register_keras_serializable(package="tests")
class Gated(layers.Layer):
    """Half precision but for its softmax."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(units, name="dense", dtype=self.dtype_policy)
        self.gate = layers.Softmax(name="gate", dtype=self.dtype_policy)

    def call(self, x):
        x = self.dense(x)
        return keras.ops.multiply(x, self.gate(x))


def test_layers_without_a_path_open_in_the_precision_that_they_had(tmp_path):
    model = Activated(8, dtype=keras_mp.MixedFloat16())
    model.compile("sgd", "mse")
    y = model.predict(X, verbose=0)
    path = tmp_path / "model.keras"
    for opened in opened_twice(model, X, path):
        found = {x.name: x.compute_dtype for x in opened._flatten_layers()}
        assert found["last"] == found["gate"] == "float32"
        assert found["block"] == found["dense"] == "float16"
    # Where keras_mp is missing it opens, with these in half precision.
    keras_mp.uninstall()
    opened = keras.models.load_model(path, compile=False)
    np.testing.assert_allclose(opened.predict(X, verbose=0), y, atol=0.01)
