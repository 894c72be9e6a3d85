"""A layer has one path, however its model was made, and after loading as well."""

import itertools

import keras
import numpy as np
import pytest
from keras import layers

import keras_mp
from keras_mp.policies.paths import variable_path

X = np.ones((2, 3, 4), "float32")
Y = np.ones((2, 2), "float32")


def parts():
    return layers.Dense(4, name="dense"), layers.Dropout(0.1, name="drop")


def functional_block():
    x = inputs = keras.Input(X.shape[1:])
    for part in parts():
        x = part(x)
    return keras.Model(inputs, x, name="block")


def sequential_block():
    return keras.Sequential([keras.Input(X.shape[1:]), *parts()], name="block")


def unbuilt_block():
    return keras.Sequential(parts(), name="block")


@keras.saving.register_keras_serializable("test_paths")
class Block(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense, self.drop = parts()

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.drop(self.dense(x))


@keras.saving.register_keras_serializable("test_paths")
class LateBlock(layers.Layer):
    def build(self, shape):
        self.dense, self.drop = parts()
        self.dense.build(shape)

    def call(self, x):
        return self.drop(self.dense(x))


BLOCKS = {
    "functional": functional_block,
    "sequential": sequential_block,
    "unbuilt": unbuilt_block,
    "layer": lambda: Block(name="block"),
    "late layer": lambda: LateBlock(name="block"),
}


def in_functional(block):
    inputs = keras.Input(X.shape[1:])
    x = layers.Dense(2, name="head")(layers.Flatten(name="flat")(block(inputs)))
    return keras.Model(inputs, x, name="net")


def in_sequential(block):
    ends = layers.Flatten(name="flat"), layers.Dense(2, name="head")
    return keras.Sequential([keras.Input(X.shape[1:]), block, *ends], name="net")


def in_unbuilt(block):
    ends = layers.Flatten(name="flat"), layers.Dense(2, name="head")
    return keras.Sequential([block, *ends], name="net")


class Net(keras.Model):
    def __init__(self, block, **kwargs):
        super().__init__(**kwargs)
        self.block = block
        self.flat, self.head = layers.Flatten(name="flat"), layers.Dense(2, name="head")

    def call(self, x):
        return self.head(self.flat(self.block(x)))


MODELS = {
    "functional": in_functional,
    "sequential": in_sequential,
    "unbuilt": in_unbuilt,
    "subclassed": lambda block: Net(block, name="net"),
}
KINDS = list(itertools.product(MODELS, BLOCKS))
PATHS = {"block/dense", "block/drop", "flat", "head"}
WEIGHTS = {"block/dense/kernel", "block/dense/bias", "head/kernel", "head/bias"}


def compiled(model):
    model.compile("sgd", "mse")
    return model


def fitted(model):
    compiled(model).fit(X, Y, verbose=0)
    return model


def called(model):
    model(X)
    return model


def called_symbolically(model):
    model(keras.Input(X.shape[1:]))
    return compiled(model)


USES = [fitted, called, called_symbolically]


def paths(model):
    """The paths of the layers that are no models, and hold none."""
    return {x.path for x in keras_mp.inspect(model).layers} - {"net", "block"}


def in_float32(model):
    found = keras_mp.inspect(model).layers
    return {x.path for x in found if x.compute_dtype == "float32"}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("outer", "inner"), KINDS)
@pytest.mark.sampled
def test_a_layer_has_one_path_in_every_kind_of_model(outer, inner, use):
    with keras_mp.policy_scope("mixed_float16"):
        model = use(MODELS[outer](BLOCKS[inner]()))
    assert paths(model) == PATHS
    assert {variable_path(v) for v in model.trainable_variables} == WEIGHTS


# A subclassed model's config does not hold the block that it is given.
@pytest.mark.parametrize(("outer", "inner"), [k for k in KINDS if k[0] != "subclassed"])
def test_so_it_has_in_a_model_that_was_loaded(outer, inner, tmp_path):
    with keras_mp.policy_scope("mixed_float16"):
        called(MODELS[outer](BLOCKS[inner]())).save(tmp_path / "net.keras")
    loaded = keras.models.load_model(tmp_path / "net.keras")
    assert paths(loaded) == PATHS
    keras_mp.convert(loaded, keras_mp.MixedFloat16(float32=["block/d.*"]))
    assert {"block/dense", "block/drop"} < in_float32(called(loaded))


@pytest.mark.parametrize("pattern", ["block/.*", ".*/dense"])
@pytest.mark.parametrize("use", [called, called_symbolically])
@pytest.mark.parametrize(("outer", "inner"), KINDS)
@pytest.mark.sampled
def test_a_pattern_matches_that_path(outer, inner, use, pattern):
    with keras_mp.policy_scope(keras_mp.MixedFloat16(float32=[pattern])):
        model = use(MODELS[outer](BLOCKS[inner]()))
    within = {"block/dense", "block/drop"} if pattern == "block/.*" else {"block/dense"}
    assert in_float32(model) - {"head"} == within


def test_a_model_within_another_keeps_the_paths_that_it_has_there():
    with keras_mp.policy_scope("mixed_float16"):
        block = functional_block()
        compiled(in_functional(block))
        compiled(block)
    assert paths(block) == {"block/dense", "block/drop"}


def test_a_layer_that_is_called_alone_is_named_with_what_it_holds():
    with keras_mp.policy_scope("mixed_float16"):
        block = Block(name="block")
        block(X)
    found = keras_mp.inspect(block).layers
    assert [layer.path for layer in found] == ["block", "block/dense", "block/drop"]
