"""The policy `BFloat16`: weights in two bytes, which train as float32 ones do."""

import copy
import pickle

import keras
import numpy as np
import pytest
from backends import values, without_us
from keras import layers, optimizers

import keras_mp
from keras_mp import BFloat16, StochasticRoundingOptimizer
from keras_mp.keras_seams import private
from keras_mp.policies.weights import LARGE

GENERATOR = np.random.default_rng(0)
X = GENERATOR.standard_normal((256, 16)).astype("float32")
Y = (X @ GENERATOR.standard_normal((16, 4))).argmax(1)
WIDTH = 256
MANY = LARGE // WIDTH


@pytest.fixture(autouse=True)
def under_the_policy():
    keras.utils.set_random_seed(0)
    with keras_mp.policy_scope("bfloat16"):
        yield


def dtypes_of(layer):
    return {v.name: private.stored_dtype(v) for v in layer.variables}


def classifier(classes=4, activation=None):
    return keras.Sequential(
        [
            keras.Input((16,)),
            layers.Dense(WIDTH, activation="relu", name="hidden"),
            layers.BatchNormalization(name="batch"),
            layers.LayerNormalization(name="layer"),
            layers.Dense(classes, activation, name="head"),
        ]
    )


def subclassed(classes=4, activation=None):
    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = classifier(classes, activation).layers

        def call(self, x):
            for layer in self.parts:
                x = layer(x)
            return x

    return Subclassed()


def compiled(model, optimizer="adam", from_logits=True, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits)
    model.compile(optimizer, loss, **options)
    return model


def trained(model, epochs=1):
    history = model.fit(X, Y, batch_size=32, epochs=epochs, verbose=0, shuffle=False)
    return history.history["loss"]


def is_rounding(optimizer):
    return isinstance(optimizer, StochasticRoundingOptimizer)


# What is in which dtype -------------------------------------------------------------


def test_the_name_gives_the_policy():
    assert keras_mp.global_policy() == BFloat16()
    assert isinstance(keras_mp.Policy("bfloat16"), BFloat16)
    assert repr(BFloat16(float32=["head"])) == "BFloat16(float32=['head'])"
    dtypes = BFloat16().compute_dtype, BFloat16().variable_dtype
    assert dtypes == ("bfloat16", "bfloat16") and BFloat16().name == "bfloat16"


@pytest.mark.parametrize("build", [classifier, subclassed])
@pytest.mark.parametrize("activation", [None, "softmax"])
@pytest.mark.parametrize("large", [False, True])
def test_weights_are_bfloat16_but_for_small_heads_and_rules(build, activation, large):
    model = build(MANY if large else 4, activation)
    compiled(model, from_logits=activation is None)
    trained(model)
    found = {layer.name: layer for layer in private.layers_in(model)}
    half, full = "bfloat16", "float32"
    assert dtypes_of(found["hidden"]) == {"kernel": half, "bias": half}
    assert dtypes_of(found["layer"]) == {"gamma": half, "beta": half}
    assert set(dtypes_of(found["batch"]).values()) == {full}
    of_head = {"kernel": half if large else full, "bias": full}
    assert dtypes_of(found["head"]) == of_head
    policies = [found[name].dtype_policy.name for name in ("hidden", "batch", "head")]
    assert policies == [half, full, full]
    assert keras.backend.standardize_dtype(model(X).dtype) == full
    slots = [v for v in model.optimizer.variables if v.shape == (16, WIDTH)]
    assert {v.dtype for v in slots} == {half}


def test_the_users_layers_stay_in_float32_with_their_weights():
    with keras_mp.policy_scope(
        BFloat16(float32=[".*hidden", layers.LayerNormalization])
    ):
        model = compiled(classifier())
    assert set(dtypes_of(model.layers[0]).values()) == {"float32"}
    assert set(dtypes_of(model.layers[2]).values()) == {"float32"}


def test_a_rule_that_speaks_after_a_layer_was_built_brings_its_weights_along():
    layer = layers.Dense(4, activity_regularizer="l2")
    layer.build((None, 16))
    assert set(dtypes_of(layer).values()) == {"bfloat16"}
    before = values([layer.kernel])[0].astype("float32")
    layer(X)
    assert set(dtypes_of(layer).values()) == {"float32"}
    assert (values([layer.kernel])[0] == before).all()


def test_a_head_in_the_middle_of_another_model_has_bfloat16_weights_again():
    inner = compiled(classifier())
    assert dtypes_of(inner.layers[-1])["kernel"] == "float32"
    compiled(keras.Sequential([inner, layers.Dense(4)]))
    assert dtypes_of(inner.layers[-1]) == {"kernel": "bfloat16", "bias": "bfloat16"}
    assert inner.layers[-1].dtype_policy.name == "bfloat16"


@pytest.mark.parametrize("cell", [layers.LSTM, layers.GRU, layers.SimpleRNN])
def test_recurrent_layers_begin_orthogonal(cell):
    layer = cell(8)
    layer(np.ones((2, 3, 4), "float32"))
    kernel = layer.cell.recurrent_kernel
    assert private.stored_dtype(kernel) == "bfloat16"
    square = values([kernel])[0].astype("float32")[:, :8]
    if cell is layers.SimpleRNN:
        np.testing.assert_allclose(square @ square.T, np.eye(8), atol=0.02)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_orthogonal_matrices_in_half_are_those_of_float32(dtype):
    drawn = [keras.initializers.Orthogonal(seed=3)((4, 4), d) for d in (dtype, None)]
    rounded = keras.ops.cast(drawn[1], dtype)
    assert keras.backend.standardize_dtype(drawn[0].dtype) == dtype
    assert (np.array(drawn[0] == rounded)).all()


@pytest.mark.once
def test_the_statistics_of_batch_normalization_want_float32():
    averages = {}
    for dtype in ("float32", "bfloat16"):
        layer = layers.BatchNormalization(dtype=dtype)
        for _ in range(600):
            layer(np.full((4, 1), 3.0, "float32"), training=True)
        (averages[dtype],) = values([layer.moving_mean])
    assert abs(averages["float32"][0] - 3) < 0.01
    assert averages["bfloat16"][0] < 2.5


# The optimizer ----------------------------------------------------------------------


@pytest.mark.parametrize("build", [classifier, subclassed])
def test_it_trains_as_in_float32(build):
    with keras_mp.policy_scope("float32"):
        full = build()
        full(X)
    model = build()
    model(X)
    model.set_weights(full.get_weights())
    expected = trained(compiled(full), epochs=5)
    found = trained(compiled(model), epochs=5)
    np.testing.assert_allclose(found, expected, rtol=0.05)
    assert found[-1] < 0.5 * found[0]


@pytest.mark.parametrize(
    "name", ["Adam", "Nadam", "SGD", "Lamb", "Adafactor", "LossScaleOptimizer"]
)
def test_compile_wraps_every_optimizer(name):
    inner = optimizers.Adam() if name == "LossScaleOptimizer" else None
    kind = getattr(keras_mp if inner else optimizers, name)
    model = compiled(subclassed(), kind(inner) if inner else kind())
    if inner:
        assert is_rounding(model.optimizer.inner_optimizer)
        assert model.optimizer.inner_optimizer.inner_optimizer is inner
    else:
        assert is_rounding(model.optimizer)
    first, *_, last = trained(model, epochs=3)
    assert last < first and np.isfinite(last)


def test_it_is_wrapped_once_and_keeps_what_it_has_learned():
    adam = optimizers.Adam()
    model = compiled(classifier(), adam)
    wrapper = model.optimizer
    trained(model)
    assert compiled(model, adam).optimizer is wrapper
    assert compiled(model, wrapper).optimizer is wrapper
    assert int(adam.iterations) == 8


def test_other_optimizers_that_a_model_holds_are_wrapped_too():
    model = subclassed()
    model.second = optimizers.Adam()
    compiled(model)
    assert is_rounding(model.optimizer) and is_rounding(model.second)


def test_nothing_is_wrapped_where_no_weight_of_ours_is_bfloat16():
    with keras_mp.policy_scope(keras.DTypePolicy("bfloat16")):
        assert not is_rounding(compiled(classifier(), "sgd").optimizer)
    kept = BFloat16(float32=[".*"])
    with keras_mp.policy_scope(kept):
        assert not is_rounding(compiled(classifier(), "sgd").optimizer)
    with keras_mp.policy_scope("mixed_bfloat16"):
        assert not is_rounding(compiled(classifier(), "sgd").optimizer)
    model = classifier()
    model.trainable = False
    assert not is_rounding(compiled(model, "sgd").optimizer)


def test_attention_alone_has_bfloat16_weights():
    inputs = keras.Input((4, 16))
    outputs = layers.MultiHeadAttention(2, 8)(inputs, inputs)
    outputs = layers.Flatten()(outputs)
    model = keras.Model(inputs, layers.Dense(4)(outputs))
    compiled(model)
    assert is_rounding(model.optimizer)
    kernels = [v for v in model.layers[1].trainable_variables]
    assert {private.stored_dtype(v) for v in kernels} == {"bfloat16"}


def test_a_fixed_loss_scale_is_divided_out_again():
    updates = []
    for factor in (None, 128.0):
        variable = keras.Variable(np.ones((64,)), dtype="bfloat16")
        optimizer = StochasticRoundingOptimizer(
            optimizers.SGD(0.5, loss_scale_factor=factor), seed=0
        )
        optimizer.build([variable])
        scaled = float(optimizer.scale_loss(keras.ops.ones(())))
        gradient = keras.ops.cast(np.full((64,), scaled), "bfloat16")
        optimizer.apply([gradient], [variable])
        updates.append(values([variable])[0].astype("float32"))
    assert (updates[0] == updates[1]).all() and (updates[0] == 0.5).all()
    assert (
        keras_mp.LossScaleOptimizer(optimizer) and optimizer.loss_scale_factor is None
    )


# Models that exist already ----------------------------------------------------------


def test_convert_to_it_names_the_remedy_and_changes_nothing():
    with keras_mp.policy_scope("float32"):
        model = compiled(classifier())
    before = [(v, v.dtype) for v in model.variables]
    with pytest.raises(ValueError, match="under the policy, and then load its weights"):
        keras_mp.convert(model, "bfloat16")
    assert [(v, v.dtype) for v in model.variables] == before
    assert {layer.dtype_policy.name for layer in model.layers} == {"float32"}


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_convert_from_it_raises_too(policy):
    model = compiled(classifier(MANY))
    with pytest.raises(ValueError, match="`policy` must keep variables"):
        keras_mp.convert(model, policy)
    with pytest.raises(ValueError, match="head/kernel"):
        keras_mp.convert(model.layers[-1], policy)


def test_convert_of_a_model_under_it_does_nothing_and_of_one_not_built_works():
    model = compiled(classifier())
    before = [private.stored_dtype(v) for v in model.variables]
    assert keras_mp.convert(model, "bfloat16") is model
    assert [private.stored_dtype(v) for v in model.variables] == before
    with keras_mp.policy_scope("float32"):
        model = keras.Sequential([layers.Dense(8), layers.Dense(4)])
    keras_mp.convert(model, "bfloat16")
    compiled(model)
    trained(model)
    assert dtypes_of(model.layers[0])["kernel"] == "bfloat16" and is_rounding(
        model.optimizer
    )


# Files ------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [4, MANY])
def test_a_file_opens_here_and_trains_on(tmp_path, classes):
    model = compiled(classifier(classes))
    trained(model)
    model.save(tmp_path / "model.keras")
    for opened in (
        keras.saving.load_model(tmp_path / "model.keras"),
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model),
    ):
        assert is_rounding(opened.optimizer)
        dtypes = [private.stored_dtype(v) for v in model.variables]
        assert [private.stored_dtype(v) for v in opened.variables] == dtypes
        assert np.array_equal(opened.predict(X, verbose=0), model.predict(X, verbose=0))
    following = trained(model), trained(opened)
    assert following[0] == following[1]
    for a, b in zip(values(model.variables), values(opened.variables), strict=True):
        assert (a == b).all()


def test_plain_keras_opens_it_with_bfloat16_weights(tmp_path):
    model = compiled(classifier(MANY))
    trained(model)
    path = str(tmp_path / "model.keras")
    model.save(path)

    def opened():
        loaded = keras.saving.load_model(path, compile=False)
        return loaded.predict(X, verbose=0), [v.dtype for v in loaded.layers[0].weights]

    with keras_mp.policy_scope("float32"):
        found, dtypes = without_us(opened)
    assert dtypes == ["bfloat16", "bfloat16"]
    np.testing.assert_allclose(found, model.predict(X, verbose=0), atol=0.05)


def test_weights_in_float32_load_under_it(tmp_path):
    with keras_mp.policy_scope("float32"):
        model = classifier()
        model.save_weights(tmp_path / "model.weights.h5")
        expected = model.predict(X, verbose=0)
    under = classifier()
    under.load_weights(tmp_path / "model.weights.h5")
    compiled(under)
    assert dtypes_of(under.layers[0])["kernel"] == "bfloat16"
    found = under.predict(X, verbose=0)
    assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)
