"""The policy `BFloat16`: weights in two bytes, which train as float32 ones do."""

import copy
import pickle

import keras
import numpy as np
import pytest
from backends import Chained, values, without_us
from keras import layers, optimizers
from processes import on_four_devices

import keras_mp
import keras_mp.keras_private as private
from keras_mp import BFloat16, StochasticRoundingOptimizer
from keras_mp.policies.weights import LARGE

once = pytest.mark.once(
    "Which dtypes weights have is decided before a backend computes."
)
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
    return Chained(classifier(classes, activation).layers)


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


@once
def test_the_name_gives_the_policy():
    assert keras_mp.global_policy() == BFloat16()
    assert isinstance(keras_mp.Policy("bfloat16"), BFloat16)
    assert repr(BFloat16(float32=["head"])) == "BFloat16(float32=['head'])"
    dtypes = BFloat16().compute_dtype, BFloat16().variable_dtype
    assert dtypes == ("bfloat16", "bfloat16") and BFloat16().name == "bfloat16"


@pytest.mark.parametrize(
    ("build", "activation", "large"),
    [
        (classifier, None, True),
        (classifier, "softmax", False),
        (subclassed, None, False),
        (subclassed, "softmax", True),
    ],
)
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
    policy = BFloat16(float32=[".*hidden", layers.LayerNormalization])
    with keras_mp.policy_scope(policy):
        hidden, _, normalization, _ = compiled(classifier()).layers
    dtypes = dtypes_of(hidden) | dtypes_of(normalization)
    assert len(dtypes) == 4 and set(dtypes.values()) == {"float32"}


def test_a_rule_that_speaks_after_a_layer_was_built_brings_its_weights_along():
    layer = layers.Dense(4, activity_regularizer="l2")
    layer.build((None, 16))
    assert set(dtypes_of(layer).values()) == {"bfloat16"}
    before = values([layer.kernel])[0].astype("float32")
    layer(X)
    assert set(dtypes_of(layer).values()) == {"float32"}
    assert (values([layer.kernel])[0] == before).all()


class Block(layers.Layer):
    """As KerasHub's: in a graph its layer is built, and is called in the first step."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(WIDTH, activation="relu")

    def build(self, shape):
        self.hidden.build(shape)

    def call(self, x):
        return self.hidden(x)

    def compute_output_shape(self, shape):
        return (*shape[:-1], WIDTH)


def test_what_a_layer_asks_for_in_float32_stays_so():
    """Keras makes the matrices of LoRA float32, whatever the policy."""
    block = Block()
    model = keras.Sequential([keras.Input((16,)), block, layers.Dense(4)])
    block.hidden.enable_lora(4)
    block.hidden.bias.trainable = model.layers[-1].trainable = False
    assert not is_rounding(compiled(model).optimizer)
    losses = trained(model, epochs=2)
    assert losses[1] < losses[0]
    assert dtypes_of(block.hidden) == {
        "kernel": "bfloat16",
        "bias": "bfloat16",
        "lora_kernel_a": "float32",
        "lora_kernel_b": "float32",
    }
    assert not is_rounding(model.optimizer)


def test_a_head_in_the_middle_of_another_model_has_bfloat16_weights_again():
    inner = compiled(classifier())
    assert dtypes_of(inner.layers[-1])["kernel"] == "float32"
    compiled(keras.Sequential([inner, layers.Dense(4)]))
    assert dtypes_of(inner.layers[-1]) == {"kernel": "bfloat16", "bias": "bfloat16"}
    assert inner.layers[-1].dtype_policy.name == "bfloat16"


def test_logits_of_tied_weights_are_float32():
    ids = keras.Input((3,), dtype="int32")
    table = layers.ReversibleEmbedding(MANY, WIDTH)
    hidden = layers.Dense(WIDTH, activation="relu")(table(ids))
    model = compiled(keras.Model(ids, table(hidden, reverse=True)))
    body = keras.Model(ids, hidden)
    assert dtypes_of(table) == {"embeddings": "bfloat16"}
    x = np.array([[1, 2, 3]])
    rows, kernel, found = values([body(x), table.embeddings, model(x)])
    assert found.dtype == "float32"
    expected = rows.astype("float64") @ kernel.T.astype("float64")
    # Rounded to bfloat16 they would be 2e-3 off.
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < 1e-5


HEADS = {
    "Dense": lambda: layers.Dense(MANY),
    "convolution": lambda: layers.Conv2D(MANY // 4, 2),
    "convolution in groups": lambda: layers.Conv2D(MANY, 2, groups=4),
    "transposed convolution": lambda: layers.Conv2DTranspose(MANY, 1),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("fed_in", ["bfloat16", "float32"])
def test_large_heads_of_any_kind_train_whatever_feeds_them(name, fed_in):
    inputs = keras.Input((3, 3, 8))
    hidden = layers.Conv2D(WIDTH, 1, activation="relu")(inputs)
    if fed_in == "float32":
        hidden = layers.BatchNormalization()(hidden)
    head = HEADS[name]()
    model = keras.Model(inputs, head(hidden))
    model.compile("sgd", "mse")
    assert dtypes_of(head) == {"kernel": "bfloat16", "bias": "float32"}
    x = GENERATOR.standard_normal((4, 3, 3, 8))
    y = GENERATOR.standard_normal((4, *model.output.shape[1:]))
    losses = model.fit(x, y, epochs=3, verbose=0).history["loss"]
    assert losses[2] < losses[1] < losses[0]
    assert model.predict(x, verbose=0).dtype == "float32"


@once
def test_a_bias_as_long_as_a_large_kernel_is_float32():
    head = layers.Dense(LARGE)
    compiled(keras.Sequential([keras.Input((1,)), layers.Dense(1), head]))
    assert dtypes_of(head) == {"kernel": "bfloat16", "bias": "float32"}


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


@once
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


def test_it_trains_as_in_float32():
    with keras_mp.policy_scope("float32"):
        full = subclassed()
        full(X)
    model = subclassed()
    model(X)
    model.set_weights(full.get_weights())
    expected = trained(compiled(full), epochs=3)
    found = trained(compiled(model), epochs=3)
    np.testing.assert_allclose(found, expected, rtol=0.05)
    assert found[-1] < 0.7 * found[0]


def test_compile_wraps_an_optimizer_and_what_scales_stays_outside():
    adam = optimizers.Adam()
    plain = compiled(subclassed(), optimizers.Nadam())
    scaled = compiled(subclassed(), keras_mp.LossScaleOptimizer(adam))
    assert is_rounding(plain.optimizer)
    assert is_rounding(scaled.optimizer.inner_optimizer)
    assert scaled.optimizer.inner_optimizer.inner_optimizer is adam
    for model in (plain, scaled):
        first, *_, last = trained(model, epochs=3)
        assert last < first and np.isfinite(last)


@once
def test_it_is_wrapped_once_and_keeps_what_it_has_learned():
    adam = optimizers.Adam()
    model = compiled(classifier(), adam)
    wrapper = model.optimizer
    trained(model)
    assert compiled(model, adam).optimizer is wrapper
    assert compiled(model, wrapper).optimizer is wrapper
    assert int(adam.iterations) == 8


@once
def test_other_optimizers_that_a_model_holds_are_wrapped_too():
    model = subclassed()
    model.second = optimizers.Adam()
    compiled(model)
    assert is_rounding(model.optimizer) and is_rounding(model.second)


def test_nothing_is_wrapped_where_no_weight_of_ours_is_bfloat16():
    theirs, kept = keras.DTypePolicy("bfloat16"), BFloat16(float32=[".*"])
    for policy in (theirs, kept, "mixed_bfloat16"):
        with keras_mp.policy_scope(policy):
            assert not is_rounding(compiled(classifier(), "sgd").optimizer)
    model = classifier()
    model.trainable = False
    assert not is_rounding(compiled(model, "sgd").optimizer)


def test_attention_alone_has_bfloat16_weights():
    inputs = keras.Input((4, 16))
    attention = layers.MultiHeadAttention(2, 8)
    hidden = layers.Flatten()(attention(inputs, inputs))
    model = compiled(keras.Model(inputs, layers.Dense(4)(hidden)))
    assert is_rounding(model.optimizer)
    dtypes = {private.stored_dtype(v) for v in attention.trainable_variables}
    assert dtypes == {"bfloat16"}


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
    assert keras_mp.LossScaleOptimizer(optimizer)
    assert optimizer.loss_scale_factor is None


# Models that exist already ----------------------------------------------------------


@once
def test_convert_to_it_names_the_remedy_and_changes_nothing():
    with keras_mp.policy_scope("float32"):
        model = compiled(classifier())
    before = [(v, v.dtype) for v in model.variables]
    with pytest.raises(ValueError, match="under the policy, and then load its weights"):
        keras_mp.convert(model, "bfloat16")
    assert [(v, v.dtype) for v in model.variables] == before
    assert {layer.dtype_policy.name for layer in model.layers} == {"float32"}


@once
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_convert_from_it_raises_too(policy):
    model = compiled(classifier(MANY))
    with pytest.raises(ValueError, match="`policy` must keep variables"):
        keras_mp.convert(model, policy)
    with pytest.raises(ValueError, match="head/kernel"):
        keras_mp.convert(model.layers[-1], policy)


@once
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
    assert dtypes_of(model.layers[0])["kernel"] == "bfloat16"
    assert is_rounding(model.optimizer)


# Files ------------------------------------------------------------------------------


def test_a_file_opens_here_and_trains_on(tmp_path):
    model = compiled(classifier(MANY))
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


@once
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


# What looks at models ---------------------------------------------------------------


def convolutional():
    model = keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            layers.Conv2D(8, 3, activation="relu", name="convolution"),
            layers.BatchNormalization(name="batch"),
            layers.Flatten(),
            layers.Dense(WIDTH, activation="relu", name="hidden"),
            layers.Dense(MANY, name="head"),
        ]
    )
    return compiled(model), GENERATOR.standard_normal((8, 6, 6, 3)), np.arange(8)


@pytest.mark.slow("Whole searches; those of the other policies stay.")
def test_diagnose_and_find_float32_layers_know_it():
    model, x, y = convolutional()
    found = keras_mp.find_float32_layers(model, x, y, verbose=0)
    assert found.policy == "bfloat16" and found.agrees
    assert found.float32_policy == BFloat16()
    assert "bfloat16" in str(keras_mp.diagnose(model, x, y)).split("\n")[0]
    assert dtypes_of(model.layers[0]) == {"kernel": "bfloat16", "bias": "bfloat16"}


@once
def test_inspect_says_what_is_in_which_dtype():
    model, *_ = convolutional()
    layers_of = keras_mp.inspect(model).layers
    rows = {row.path.split("/")[-1]: row for row in layers_of}
    dtypes = {path: row.variable_dtype for path, row in rows.items()}
    assert dtypes["convolution"] == "bfloat16" and dtypes["batch"] == "float32"
    head = rows["head"]
    assert head.variable_dtype == "bfloat16, float32"
    assert head.weight_bytes == 2 * WIDTH * MANY + 4 * MANY
    assert rows["batch"].decided_by == "BatchNormalization"
    assert not head.half_copy_bytes


@once
def test_compare_trains_under_it():
    def build():
        return compiled(classifier())

    policies = ("float32", "bfloat16", "mixed_bfloat16")
    data = (X, Y), (X, Y)
    found = keras_mp.compare(build, *data, policies=policies, seeds=1, verbose=0)
    assert found.policies == policies
    losses = [found.values(policy, "loss")[0] for policy in policies]
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


# On several devices -----------------------------------------------------------------


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="keras.distribution")
@pytest.mark.slow("Several devices or processes; one such test stays in `make test`.")
def test_on_several_devices_weights_are_the_same_everywhere():
    found = on_four_devices("rounding_on_devices.py")
    one = found["one"]
    assert one["losses"][-1] < 0.75 * one["losses"][0]
    # Copies of each part; whole kernels on four devices, halves on two of them each.
    assert {kind: f["copies"] for kind, f in found.items()} == {
        "one": [1],
        "data": [4],
        "model": [2],
    }
    assert found["model"]["parts"] == [2, 2, 2]  # The kernel and its two slots.
    for on_devices in found.values():
        assert on_devices["dtypes"] == ["bfloat16"]
        assert not on_devices["differ"]
        np.testing.assert_allclose(on_devices["losses"], one["losses"], rtol=1e-3)
        # The bits that round are those of the place; sums may differ in their order.
        equal = np.equal(on_devices["kernel"], one["kernel"])
        assert equal.mean() > 0.99
