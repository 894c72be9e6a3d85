"""Scaled dot-product attention in float16: it runs, and does not overflow."""

import inspect
import math

import keras
import numpy as np
import pytest
from backends import BACKEND, same_bits, without_us
from keras import ops
from keras.src import backend as keras_backend

import keras_mp

pytestmark = pytest.mark.usefixtures("installed")

layers = keras.layers
RANDOM = np.random.default_rng(0)


def attention_of(name, **options):
    if name == "MultiHeadAttention":
        return layers.MultiHeadAttention(4, 16, **options)
    return layers.GroupQueryAttention(16, 4, 2, **options)


both = pytest.mark.parametrize("name", ["MultiHeadAttention", "GroupQueryAttention"])


def tokens(std, dtype="float16"):
    x = np.random.default_rng(1).normal(size=(2, 8, 64)) * std
    return x.astype(dtype)


def pair(name, **options):
    """Attention in float16, and in float32 with the same weights."""
    keras.utils.set_random_seed(2)
    x = tokens(1)
    half = attention_of(name, dtype=keras_mp.MixedFloat16(), **options)
    half(x, x)
    full = attention_of(name, **options)
    full(x.astype("float32"), x.astype("float32"))
    full.set_weights(half.get_weights())
    return half, full


def array(tensor):
    return ops.convert_to_numpy(ops.cast(tensor, "float32"))


@both
@pytest.mark.parametrize("masked", ["not", "causal", "mask"])
def test_attention_agrees_with_float32_but_for_rounding(name, masked):
    half, full = pair(name)
    x = tokens(1)
    options = {
        "not": {},
        "causal": {"use_causal_mask": True},
        "mask": {"attention_mask": RANDOM.random((2, 8, 8)) < 0.8},
    }[masked]
    want = array(full(x.astype("float32"), x.astype("float32"), **options))
    got = array(half(x, x, **options))
    # Five roundings in a row: to q, k and v, their product, and the output.
    assert np.max(np.abs(want - got)) < 5 * 2.0**-11 * np.max(np.abs(want))
    assert np.any(want != got)


@both
@pytest.mark.parametrize("std", [33, 100])
def test_large_tokens_give_no_nan(name, std):
    half, full = pair(name)
    x = tokens(std)
    with_dropout, _ = pair(name, dropout=0.5)
    for layer in (half, with_dropout):
        result = layer(x, x)
        assert keras.backend.standardize_dtype(result.dtype) == "float16"
        assert np.all(np.isfinite(array(result)))
    want = array(full(x.astype("float32"), x.astype("float32")))
    # Logits of thousands keep 11 bits: the softmax may pick a neighbour here and there.
    close = np.abs(array(half(x, x)) - want) < 0.02 * np.max(np.abs(want))
    assert np.mean(close) > 0.7


@both
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_in_float16_trains(name, dropout):
    x = keras.Input((8, 64))
    with keras_mp.policy_scope("mixed_float16"):
        y = attention_of(name, dropout=dropout)(x, x, use_causal_mask=True)
        model = keras.Model(x, layers.Dense(1)(y))
    model.compile(keras.optimizers.SGD(1e-2), "mse")
    data = tokens(1, "float32"), np.ones((2, 8, 1), "float32")
    before = [array(v) for v in model.trainable_variables]
    losses = model.fit(*data, epochs=3, verbose=0).history["loss"]
    assert np.all(np.isfinite(losses)) and losses[-1] < losses[0]
    assert int(model.optimizer.skipped_steps) == 0
    moved = {
        v.path
        for v, b in zip(model.trainable_variables, before, strict=True)
        if not np.array_equal(array(v), b)
    }
    # The softmax does not see what the key's bias adds to all logits of a row.
    assert {v.path for v in model.trainable_variables} - moved <= {
        v.path for v in model.trainable_variables if "key/bias" in v.path
    }


def inputs(std=1.0, heads=4, dtype="float16", size=16):
    shape = (2, 8, heads, size)
    return [
        ops.convert_to_tensor(
            (np.random.default_rng(i).normal(size=shape) * std).astype("float32"), dtype
        )
        for i in range(3)
    ]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("scale", [None, 0.125, 1.0])
@pytest.mark.parametrize("causal", [False, True])
def test_the_bits_are_those_of_keras_where_keras_works(dtype, scale, causal):
    if BACKEND == "jax" and dtype != "float32":
        pytest.skip("float32 on CPUs: test_fused_attention.py has float64 beside it")
    # The default scale for a size of 16 is 1/4, a power of two as well.
    arguments = inputs(dtype=dtype)
    options = {"scale": scale, "is_causal": causal}

    def attend():
        return array(ops.dot_product_attention(*arguments, **options))

    assert same_bits([without_us(attend)], [attend()])


@pytest.mark.parametrize("scale", [None, 0.3])
def test_a_scale_that_is_no_power_of_two_is_rounded_once(scale):
    size = 12
    arguments = inputs(size=size)
    got = array(ops.dot_product_attention(*arguments, scale=scale))
    q, k, v = (array(x).astype("float64") for x in arguments)
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) * (scale or 1 / math.sqrt(size))
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    want = np.einsum("bhqk,bkhd->bqhd", weights, v)
    assert np.max(np.abs(want - got)) < 4 * 2.0**-11 * np.max(np.abs(want))


def test_a_product_beyond_65504_is_scaled_before():
    # q·k is 16 * 100 * 100 = 160000, and 40000 once it is scaled.
    arguments = [ops.ones((1, 2, 1, 16), "float16") * 100.0 for _ in range(3)]
    arguments = [ops.cast(x, "float16") for x in arguments]
    got = array(ops.dot_product_attention(*arguments))
    assert np.array_equal(got, np.full((1, 2, 1, 16), 100.0, "float32"))


def test_inputs_of_several_dtypes_give_what_they_give_in_keras():
    q, k, v = inputs()
    k = ops.cast(k, "float32")
    if BACKEND != "tensorflow":
        pytest.skip("Keras refuses them there")
    want = without_us(lambda: ops.dot_product_attention(q, k, v).dtype)
    assert ops.dot_product_attention(q, k, v).dtype == want


def test_it_is_taken_out_with_the_rest():
    ours = keras_backend.nn.dot_product_attention
    stock = without_us(lambda: keras_backend.nn.dot_product_attention)
    assert inspect.unwrap(ours) is stock
    assert ours is not stock
    assert inspect.signature(ours) == inspect.signature(stock)


class LearnedScale(layers.Layer):
    """Attention whose scale is a weight."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        x = ops.expand_dims(x, 2)
        return ops.dot_product_attention(x, x, x, scale=self.scale.value)[:, :, 0]


@pytest.mark.skipif(BACKEND == "torch", reason="torch takes no tensor for a scale")
def test_a_learned_scale_gets_its_gradient():
    def gradient(policy):
        inputs = keras.Input((4, 8))
        outputs = LearnedScale(dtype=policy, name="attention")(inputs)
        model = keras.Model(inputs, layers.Dense(1, kernel_initializer="ones")(outputs))
        optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(1.0), 128.0)
        model.compile(optimizer, "mse")
        x = np.random.default_rng(0).normal(size=(2, 4, 8)).astype("float32")
        model.fit(x, np.zeros((2, 4, 1), "float32"), verbose=0)
        return float(ops.convert_to_numpy(model.get_layer("attention").scale)) - 1

    half, full = gradient("mixed_float16"), gradient("float32")
    assert full != 0 and half == pytest.approx(full, rel=0.02)


def test_arrays_and_lists_are_attended_as_in_keras():
    x = np.ones((1, 2, 1, 4), "float16")
    assert ops.dot_product_attention(x, x, x).shape == (1, 2, 1, 4)
    lists = x.astype("float32").tolist()
    assert np.array_equal(
        ops.convert_to_numpy(ops.dot_product_attention(lists, lists, lists)),
        np.ones((1, 2, 1, 4)),
    )
