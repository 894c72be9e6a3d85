"""A policy that stands on a wrapper reaches what it wraps, to the last cell."""

import keras
import numpy as np
import pytest
from allpairspy import AllPairs
from backends import dtype_of
from keras import ops
from keras.src import ops as keras_ops
from test_conversion import dtypes_within

import keras_mp

layers = keras.layers
POLICIES = {"float16": keras_mp.MixedFloat16, "bfloat16": keras_mp.MixedBFloat16}
SEQUENCE = np.random.default_rng(0).normal(size=(2, 3, 4)).astype("float32")
IMAGE = np.random.default_rng(0).normal(size=(2, 3, 6, 6, 2)).astype("float32")

WRAPPERS = {
    "Bidirectional": lambda **k: layers.Bidirectional(layers.LSTM(2), **k),
    "Bidirectional, two layers": lambda **k: layers.Bidirectional(
        layers.GRU(2), backward_layer=layers.GRU(2, go_backwards=True), **k
    ),
    "Bidirectional of a stack": lambda **k: layers.Bidirectional(
        layers.RNN([layers.GRUCell(2), layers.LSTMCell(2)]), **k
    ),
    "TimeDistributed": lambda **k: layers.TimeDistributed(layers.Dense(2), **k),
    "TimeDistributed of a model": lambda **k: layers.TimeDistributed(
        keras.Sequential([layers.Dense(2), layers.Dense(3)]), **k
    ),
    "TimeDistributed of itself": lambda **k: layers.TimeDistributed(
        layers.TimeDistributed(layers.Dense(2)), **k
    ),
    "RNN": lambda **k: layers.RNN(layers.SimpleRNNCell(2), **k),
    "RNN of a stack": lambda **k: layers.RNN(
        layers.StackedRNNCells([layers.LSTMCell(2), layers.GRUCell(3)]), **k
    ),
    "MultiHeadAttention": lambda **k: Self(layers.MultiHeadAttention(2, 3, **k)),
    "GroupQueryAttention": lambda **k: Self(layers.GroupQueryAttention(3, 2, 1, **k)),
    "SpectralNormalization": lambda **k: layers.SpectralNormalization(
        layers.Dense(2), **k
    ),
    "ConvLSTM2D": lambda **k: layers.ConvLSTM2D(2, 3, **k),
    "a layer of the user's": lambda **k: Block(**k),
}


class Self(layers.Layer):
    """Self-attention, autocasting nothing itself."""

    def __init__(self, attention):
        super().__init__(autocast=False)
        self.attention = attention

    def call(self, x, **kwargs):
        return self.attention(x, x, **kwargs)


class Block(layers.Layer):
    """Layers in a list, in a layer, and some that are made when it is built."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.early = [layers.Dense(3), layers.TimeDistributed(layers.Dense(3))]

    def build(self, shape):
        self.late = layers.Bidirectional(layers.SimpleRNN(2))

    def call(self, x):
        for layer in self.early:
            x = layer(x)
        return self.late(x)


# A rule keeps SpectralNormalization in float32, but not what it wraps.
KEPT = (Self, layers.InputLayer, layers.SpectralNormalization)


def input_for(name):
    if name == "ConvLSTM2D":
        return IMAGE
    if name == "TimeDistributed of itself":
        return IMAGE[:, :, :, :, 0]
    return SEQUENCE


def called(make, x, policy, globally):
    """A wrapper under the global policy or one of its own, called: what it returns.

    And the dtypes that its layers computed in.
    """
    with keras_mp.policy_scope(policy if globally else "float32"):
        wrapper = make(**({} if globally else {"dtype": policy}))
        with dtypes_within(wrapper) as computed:
            result = wrapper(x)
    return wrapper, result, computed


@pytest.mark.parametrize(
    ("dtype", "globally"), [("float16", False), ("bfloat16", False), ("float16", True)]
)
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.sampled
def test_all_that_a_wrapper_wraps_computes_as_the_wrapper_is_told(
    name, dtype, globally
):
    wrapper, _, computed = called(
        WRAPPERS[name], input_for(name), POLICIES[dtype](), globally
    )
    for layer in wrapper._flatten_layers():
        if not isinstance(layer, KEPT):
            assert layer.compute_dtype == dtype, layer.name
            assert computed.get(id(layer), dtype) == dtype, layer.name
            assert layer.variable_dtype == "float32"
    assert dtype in computed.values()
    assert {w.dtype for w in wrapper.trainable_weights} == {"float32"}


def test_without_us_the_policy_of_a_wrapper_reaches_no_child():
    keras_mp.uninstall()
    for wrapper in (
        layers.TimeDistributed(layers.Dense(2), dtype="mixed_float16"),
        layers.Bidirectional(layers.LSTM(2), dtype="mixed_float16"),
        layers.SpectralNormalization(layers.Dense(2), dtype="mixed_float16"),
    ):
        child = wrapper._flatten_layers(include_self=False)[0]
        assert child.compute_dtype == "float32"


SOFTMAX = [
    (layers.TimeDistributed, lambda: layers.Dense(3, activation="softmax")),
    (layers.TimeDistributed, layers.Softmax),
    (layers.Bidirectional, lambda: layers.LSTM(2, activation="softmax")),
    (layers.RNN, lambda: layers.SimpleRNNCell(2, activation="softmax")),
]
OF_THE_USER = [
    (layers.Bidirectional, lambda: layers.LSTM(2, dtype="float32")),
    (layers.RNN, lambda: layers.SimpleRNNCell(2, dtype="float32")),
    (layers.TimeDistributed, lambda: layers.Dense(2, dtype="float32")),
    (layers.SpectralNormalization, lambda: layers.Dense(2, dtype="float32")),
]


@pytest.mark.parametrize(
    ("wrap", "inner", "globally"),
    [
        *((*row, True) for row in SOFTMAX + OF_THE_USER),
        *((*row, False) for row in SOFTMAX),
    ],
)
def test_what_stays_in_float32_inside_brings_the_wrapper_to_float32(
    wrap, inner, globally
):
    wrapper, result, computed = called(
        lambda **k: wrap(inner(), **k), SEQUENCE, keras_mp.MixedFloat16(), globally
    )
    assert {x.compute_dtype for x in wrapper._flatten_layers()} == {"float32"}
    assert set(computed.values()) == {"float32"}
    assert dtype_of(result) == wrapper(keras.Input((3, 4))).dtype == "float32"


def test_what_the_user_said_for_a_layer_in_a_block_is_respected():
    class Mixed(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.careful = layers.Dense(2, dtype="float32")
            self.plain = layers.Dense(2)

        def call(self, x):
            return self.plain(self.careful(x))

    with keras_mp.policy_scope("mixed_float16"):
        block = Mixed()
        block(SEQUENCE)
    assert block.careful.compute_dtype == "float32"
    assert block.plain.compute_dtype == "float16"


@pytest.mark.parametrize("dtype", POLICIES)
@pytest.mark.parametrize("name", ["TimeDistributed", "Bidirectional", "RNN of a stack"])
def test_a_wrapper_computes_what_float32_computes_but_for_rounding(name, dtype):
    keras.utils.set_random_seed(1)
    half = WRAPPERS[name](dtype=POLICIES[dtype]())
    half(SEQUENCE)
    full = WRAPPERS[name]()
    full(SEQUENCE)
    full.set_weights(half.get_weights())
    want, got = (
        ops.convert_to_numpy(ops.cast(m(SEQUENCE), "float32")) for m in (full, half)
    )
    error = np.max(np.abs(want - got))
    assert 0 < error < 8 * {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]


# Attention ------------------------------------------------------------------------


@pytest.fixture
def products(monkeypatch):
    """The dtypes of all einsums and fused attentions: the products of attention."""
    seen = []
    einsum = ops.einsum
    fused = ops.dot_product_attention

    def record(function):
        def recorded(*tensors, **kwargs):
            result = function(*tensors, **kwargs)
            operands = [*tensors, *kwargs.values()]
            dtypes = {dtype_of(t) for t in operands if ops.is_tensor(t)}
            seen.append((dtypes, dtype_of(result)))
            return result

        return recorded

    monkeypatch.setattr(keras_ops, "einsum", record(einsum))
    monkeypatch.setattr(keras_ops, "dot_product_attention", record(fused))
    return seen


ATTENTIONS = {
    "MultiHeadAttention": lambda **k: layers.MultiHeadAttention(2, 4, **k),
    "GroupQueryAttention": lambda **k: layers.GroupQueryAttention(4, 2, 1, **k),
}


# Every pair of two entries.
TABLE = [
    [*ATTENTIONS], [False, True], [0.0, 0.1], ["global", "per layer", "converted"],
    [*POLICIES],
]  # fmt: skip


@pytest.mark.parametrize("name, scores, dropout, how, dtype", [*AllPairs(TABLE)])
def test_the_product_of_attention_is_a_half_one(
    name, scores, dropout, how, dtype, products
):
    policy = POLICIES[dtype]()
    if how == "global":
        with keras_mp.policy_scope(policy):
            attention = ATTENTIONS[name](dropout=dropout)
    else:
        own = {"dtype": policy} if how == "per layer" else {}
        attention = ATTENTIONS[name](dropout=dropout, **own)
    x = SEQUENCE.astype(dtype if dtype == "float16" else "float32")
    attention(x, x)
    if how == "converted":
        keras_mp.convert(attention, policy)
    products.clear()
    result = attention(x, x, return_attention_scores=scores, training=True)
    assert dtype_of(result[0] if scores else result) == dtype
    # q·k and the product with the values, or both in one.
    assert len(products) >= (2 if scores or dropout else 1)
    assert {d for _, d in products} == {dtype}
    # A mask is not a factor.
    assert [dtypes - {"bool"} for dtypes, _ in products] == [{dtype}] * len(products)


def test_a_policy_set_on_a_graph_leaves_its_layers_as_they_are():
    """As KerasHub's models do it, whose layers have been called by then."""
    inputs = keras.Input((4,))
    outputs = layers.Dense(2, name="head")(layers.Dense(3, name="hidden")(inputs))
    model = keras.Model(inputs, outputs)
    model.dtype_policy = keras_mp.MixedFloat16()
    x = np.ones((2, 4), "float32")
    for _ in range(2):
        assert dtype_of(model(x)) == "float32"
        assert model.outputs[0].dtype == "float32"
    assert {x.compute_dtype for x in model.layers} == {"float32"}
