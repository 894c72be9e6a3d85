"""The rules: each says what, why and by whose word; users and authors add theirs."""

import html

import keras
import numpy as np
import pytest
from backends import BACKEND, computes

import keras_mp
from keras_mp.policies.stock_rules import RULES, Rule

layers = keras.layers


@pytest.fixture(autouse=True)
def no_authors_classes(monkeypatch):
    monkeypatch.setattr(keras_mp.policies.stock_rules, "_kept", {})


def decided(layer, x, policy=None):
    """The name of the rule that keeps a layer in float32, None if it is half."""
    with keras_mp.policy_scope(policy or keras_mp.MixedFloat16()):
        layer = layer()
        layer(x)
    decision = keras_mp.policies.choosing.decision_for(layer)
    assert layer.compute_dtype == ("float32" if decision.rule else "float16")
    return decision.rule and decision.rule.name


X = np.ones((2, 3), "float32")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_has_a_name_a_reason_a_source_and_its_backends(rule):
    assert rule.name and rule.reason and rule.source
    assert not rule.reason.endswith(".") and "\n" not in rule.reason
    assert set(rule.backends) <= {"jax", "tensorflow", "torch"} and rule.backends


def test_the_table_prints_every_rule_at_80_columns_and_a_notebook_every_word_of_it():
    text = str(RULES)
    assert max(len(line) for line in text.splitlines()) <= 80
    words = " ".join(text.split())
    for rule in RULES:
        assert rule.name.split()[0][:8] in words  # Long names are folded.
    assert "stays in float32" in words and "because" in words
    shown = RULES._repr_html_()
    for rule in RULES:
        assert html.escape(rule.reason) in shown and html.escape(rule.source) in shown


def test_the_table_of_a_policy_has_the_users_rules_first_and_the_authors_next():
    class Mine(layers.Layer):
        pass

    keras_mp.keep_float32(Mine, reason="it counts")
    policy = keras_mp.MixedFloat16(float32=[layers.Dense, "decoder/.*", is_wide])
    names = [rule.name for rule in policy.rules]
    assert names[:4] == ["Dense", "decoder/.*", "is_wide", "Mine"]
    assert policy.rules[4:] == RULES
    text = str(policy.rules)
    assert "it counts" in text and "its author" in text and "decoder/.*" in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert type(policy.rules)(policy.rules).table().rows[0][3] == "the user"


def is_wide(layer):
    return getattr(layer, "units", 0) > 10


def test_a_rule_of_the_users_own_is_one_of_the_table_on_its_backends_alone():
    here = keras.backend.backend()
    others = tuple({"jax", "tensorflow", "torch"} - {here})
    for backends, expected in (((), "wide"), ([(here,)], "wide"), ([others], None)):
        rule = Rule("wide", is_wide, "they are wide", "our measurements", *backends)
        policy = keras_mp.MixedFloat16(float32=[rule])
        assert policy.rules[0] is rule
        assert decided(lambda: layers.Dense(11), X, policy) == expected
        assert decided(lambda: layers.Dense(10), X, policy) is None


def test_the_first_rule_that_matches_is_the_one_that_is_told():
    def softmax():
        return layers.Dense(11, activation="softmax")

    assert decided(softmax, X) == "softmax"
    policy = keras_mp.MixedFloat16(float32=[is_wide, lambda layer: True])
    assert decided(softmax, X, policy) == "is_wide"
    # Classes decide when a layer is created, before anything else can be asked.
    policy = keras_mp.MixedFloat16(float32=[is_wide, layers.Dense])
    assert decided(softmax, X, policy) == "Dense"


# keep_float32 ---------------------------------------------------------------------


def test_keep_float32_decorates_a_class():
    @keras_mp.keep_float32
    class Careful(layers.Dense):
        """Mine."""

    assert Careful.__doc__ == "Mine." and issubclass(Careful, layers.Dense)
    assert decided(lambda: Careful(2), X) == "Careful"
    assert decided(lambda: layers.Dense(2), X) is None


def test_keep_float32_is_called_on_a_class_with_a_reason():
    class Careful(layers.Dense):
        pass

    class Heir(Careful):
        pass

    assert decided(lambda: Careful(2), X) is None
    assert keras_mp.keep_float32(Careful, reason="it divides") is Careful
    assert decided(lambda: Heir(2), X) == "Careful"
    assert keras_mp.MixedBFloat16().rules[0].reason == "it divides"
    keras_mp.keep_float32(Careful, reason="it divides twice")  # The last word.
    kept = [r for r in keras_mp.MixedFloat16().rules if r.name == "Careful"]
    assert [r.reason for r in kept] == ["it divides twice"]


def test_keep_float32_holds_for_policies_that_exist_and_for_conversions():
    class Careful(layers.Dense):
        pass

    policy = keras_mp.MixedFloat16()
    keras_mp.keep_float32(Careful)
    assert decided(lambda: Careful(2), X, policy) == "Careful"
    model = keras.Sequential([Careful(2), layers.Dense(2), layers.Dense(2)])
    model(X)
    keras_mp.convert(model, "mixed_bfloat16")
    assert computes(model) == ["float32", "bfloat16", "float32"]
    # The user's own word for one layer goes before the author's.
    assert Careful(2, dtype="mixed_float16")(X) is not None
    stock = Careful(2, dtype=keras.DTypePolicy("mixed_float16"))
    stock(X)
    assert stock.compute_dtype == "float16"


@pytest.mark.parametrize(
    "bad",
    [None, "Dense", 3, object, layers.Dense(1), lambda layer: True, [layers.Dense]],
)
def test_keep_float32_refuses_what_is_no_class_of_layers(bad):
    before = list(keras_mp.MixedFloat16().rules)
    with pytest.raises(
        TypeError, match="`layer_class` must be a subclass.*Received: layer_class="
    ):
        keras_mp.keep_float32(bad)
    assert list(keras_mp.MixedFloat16().rules) == before


# Each rule, by a layer that it keeps and one like it that it does not ----------------

SEQUENCE = np.ones((2, 3, 4), "float32")
IMAGE = np.ones((1, 4, 4, 2), "float32")


def sequence(steps):
    return np.ones((1, steps, 1), "float32")


class NonMaxSuppression(layers.Dense):
    """Stands for KerasHub's layer."""

    __module__ = "keras_hub.src.layers.modeling.non_max_supression"


def both(kept, half, x):
    return (kept, x), (half, x)


PAIRS = {
    "NonMaxSuppression": both(lambda: NonMaxSuppression(2), lambda: layers.Dense(2), X),
    "softmax": both(layers.Softmax, layers.ReLU, X),
    "preprocessing": both(
        lambda: layers.Rescaling(0.1), lambda: layers.Dropout(0.1), X
    ),
    "Masking": both(lambda: layers.Masking(0.1), lambda: layers.Masking(0.0), SEQUENCE),
    "activity_regularizer": (
        (lambda: layers.Dense(2, activity_regularizer="l2"), X),
        (lambda: layers.Dense(2, kernel_regularizer="l2"), X),
    ),
    "UnitNormalization, Dot(normalize=True)": both(
        lambda: layers.Dot(1, normalize=True), lambda: layers.Dot(1), [X, X]
    ),
    "squareplus": (
        (lambda: layers.Dense(2, activation="squareplus"), X),
        (lambda: layers.Dense(2, activation="softplus"), X),
    ),
    "averages": both(layers.Average, layers.Add, [X, X]),
    "long LSTM": (
        (lambda: layers.LSTM(1, unroll=False), sequence(2049)),
        (lambda: layers.LSTM(1), sequence(3)),
    ),
    "wide average pooling": (
        (lambda: layers.AveragePooling1D(256), sequence(256)),
        (lambda: layers.AveragePooling1D(128), sequence(128)),
    ),
    "interpolated UpSampling2D": (
        (lambda: layers.UpSampling2D(2, interpolation="bilinear"), IMAGE),
        (lambda: layers.UpSampling2D(2), IMAGE),
    ),
    "3-D max pooling": (
        (lambda: layers.MaxPooling3D(2), np.ones((1, 2, 2, 2, 1), "float32")),
        (lambda: layers.UpSampling3D(2), np.ones((1, 2, 2, 2, 1), "float32")),
    ),
    "ConvLSTM3D": (
        (lambda: layers.ConvLSTM3D(1, 1), np.ones((1, 2, 2, 2, 2, 1), "float32")),
        (lambda: layers.ConvLSTM1D(1, 1), np.ones((1, 2, 2, 1), "float32")),
    ),
    "Attention, AdditiveAttention": both(
        layers.AdditiveAttention, layers.Concatenate, [SEQUENCE, SEQUENCE]
    ),
    "SpectralNormalization": (
        (lambda: layers.SpectralNormalization(layers.Dense(2)), X),
        (lambda: layers.TimeDistributed(layers.Dense(2)), SEQUENCE),
    ),
}
BY_NAME = {rule.name: rule for rule in RULES}


@pytest.mark.parametrize("name", PAIRS)
def test_a_rule_keeps_one_layer_and_not_its_like(name):
    (kept, x), (half, y) = PAIRS[name]
    here = keras.backend.backend() in BY_NAME[name].backends
    assert decided(kept, x) == (name if here else None)
    assert decided(half, y) is None


def test_every_rule_has_a_name_of_its_own_and_is_asked_above():
    elsewhere = {"output layer", "what it wraps", "TorchModuleWrapper", "TFSMLayer"}
    assert sorted(rule.name for rule in RULES) == sorted([*PAIRS, *elsewhere])


@pytest.mark.skipif(BACKEND != "tensorflow", reason="Keras has the layer there alone")
def test_an_exported_program_gets_the_dtypes_that_it_takes(half, tmp_path):
    exported = keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Dense(2)])
    exported.export(tmp_path / "program", verbose=False)
    program = layers.TFSMLayer(tmp_path / "program", call_endpoint="serve")
    np.testing.assert_array_equal(program(X), exported(X))
    model = keras.Sequential([keras.Input((3,)), layers.Dense(3), program])
    assert model.layers[0].compute_dtype == half
    assert np.isfinite(model.predict(X, verbose=0)).all()
