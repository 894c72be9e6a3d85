"""A model's inputs keep their dtype until the first layer."""

import keras
import numpy as np
import pytest
from backends import BACKEND, POLICIES, dtype_of, guide_model, scaling_model
from keras import ops

import keras_mp

layers = keras.layers
# float16 holds every whole number up to 2048, bfloat16 up to 256.
IDS = np.array([[1.0, 257.0, 2049.0], [4097.0, 30001.0, 59999.0]], "float32")
LARGE = np.array([[1e5, -2e5, 3e5], [123457.0, 70001.0, 65521.0]], "float32")


def array(tensor):
    return ops.convert_to_numpy(ops.cast(tensor, "float32"))


def is_shell(layer):
    return isinstance(layer, (keras.Model, layers.InputLayer))


class Rows(layers.Layer):
    """Which rows of a table the ids that it is called with are, in float32."""

    def __init__(self, **kwargs):
        super().__init__(**{"dtype": "float32", **kwargs})

    def build(self, shape):
        self.nothing = self.add_weight(shape=(), initializer="zeros")

    def call(self, ids):
        return ops.cast(ops.cast(ids, "int32"), "float32") + self.nothing


@keras.saving.register_keras_serializable(package="tests")
class Chain(keras.Model):
    """A subclassed model that calls its layers in a row."""

    def __init__(self, chain, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.chain = chain

    def call(self, x):
        for layer in self.chain:
            x = layer(x)
        return x

    def get_config(self):
        chain = [keras.saving.serialize_keras_object(layer) for layer in self.chain]
        return {**super().get_config(), "chain": chain}

    @classmethod
    def from_config(cls, config):
        chain = config.pop("chain")
        return cls(
            [keras.saving.deserialize_keras_object(layer) for layer in chain], **config
        )


def in_sequential(*chain):
    return keras.Sequential(list(chain))


def in_subclassed(*chain):
    return Chain(list(chain))


def in_functional(*chain):
    x = keras.Input((3,))
    y = x
    for layer in chain:
        y = layer(y)
    return keras.Model(x, y)


MODELS = {
    "sequential": in_sequential,
    "subclassed": in_subclassed,
    "functional": in_functional,
    "sequential in sequential": lambda *chain: in_sequential(in_sequential(*chain)),
    "sequential in subclassed": lambda *chain: in_subclassed(in_sequential(*chain)),
    "subclassed in subclassed": lambda *chain: in_subclassed(in_subclassed(*chain)),
    "subclassed in sequential": lambda *chain: in_sequential(in_subclassed(*chain)),
    "subclassed in functional": lambda *chain: in_functional(in_subclassed(*chain)),
}
models = pytest.mark.parametrize("model_of", MODELS.values(), ids=MODELS)


@models
def test_a_float32_layer_sees_ids_and_features_as_they_were(model_of, half):
    model = model_of(Rows())
    for x in (IDS, LARGE):
        assert np.array_equal(array(model(x)), x)
        assert np.array_equal(model.predict(x, verbose=0), x)


@models
def test_an_embedding_finds_the_rows_of_ids_carried_as_floats(model_of, half):
    embedding = layers.Embedding(60000, 1)
    model = model_of(embedding, layers.Flatten())
    got = array(model(IDS))
    table = array(ops.cast(embedding.embeddings.value, half))
    assert np.array_equal(got, table[IDS.astype(int), 0])


@models
def test_normalization_adapted_before_the_first_call_sees_raw_features(model_of, half):
    normalization = layers.Normalization()
    normalization.adapt(LARGE)
    model = model_of(normalization, layers.Dense(2, kernel_initializer="ones"))
    got = array(model(LARGE))
    spread = (LARGE - LARGE.mean(0)) / LARGE.std(0)
    want = spread.sum(axis=1, keepdims=True) * np.ones((1, 2))
    assert np.allclose(got, want, atol=3 * 2.0 ** (-10 if half == "float16" else -7))


@pytest.mark.parametrize(
    "cast",
    [
        np.asarray,
        lambda x: x.astype("float64"),
        lambda x: x.astype("int32"),
        lambda x: x.astype("int64") if BACKEND != "jax" else x.astype("int32"),
        ops.convert_to_tensor,
        lambda x: x.tolist() and ops.convert_to_tensor(x.tolist()),
    ],
    ids=["float32", "float64", "int32", "int64", "tensor", "list"],
)
@pytest.mark.parametrize("model_of", [in_subclassed, in_sequential])
def test_inputs_of_every_kind_reach_the_first_layer(cast, model_of, half):
    model = model_of(Rows(), layers.Dense(1, dtype="float32"))
    model.compile("sgd", "mse")
    x = cast(IDS)
    first = model.chain[0](x) if model_of is in_subclassed else x
    assert np.array_equal(array(first), IDS)
    want = array(model(IDS))
    assert np.allclose(array(model(x)), want, rtol=1e-6)


@pytest.mark.parametrize("run", ["fit", "train_on_batch", "evaluate", "predict"])
@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}])
@pytest.mark.parametrize("model_of", [in_subclassed, in_sequential])
@pytest.mark.sampled
def test_no_function_of_the_model_rounds(model_of, options, run, half):
    if options and half == "bfloat16":
        pytest.skip("float16 has said it")
    model = model_of(Rows())
    model.compile("sgd", loss=lambda y, rows: ops.mean(ops.abs(rows - y)), **options)
    if run == "predict":
        assert np.array_equal(model.predict(IDS, verbose=0), IDS)
    else:
        quiet = {} if run == "train_on_batch" else {"verbose": 0}
        result = getattr(model, run)(IDS, IDS, **quiet)
        loss = result.history["loss"] if hasattr(result, "history") else result
        assert np.all(np.asarray(loss) == 0)


def test_a_train_step_of_the_users_own_calls_the_model_with_what_came(half):
    # Only in float16 `compile` gives the model an optimizer that scales.
    scales = keras_mp.global_policy().compute_dtype == "float16"

    class UsersOwn(scaling_model() if scales else guide_model()):
        def __init__(self):
            super().__init__()
            self.rows = Rows()

        def call(self, x, training=False):
            return self.rows(x)

    model = UsersOwn()
    model(IDS)
    model.compile("sgd", "mae")
    assert model.fit(IDS, IDS, verbose=0).history["loss"] == [0.0]


@keras.saving.register_keras_serializable(package="tests")
class TwoInputs(keras.Model):
    """Called with a list, a dictionary, or several arguments."""

    def call(self, ids, features=None):
        if isinstance(ids, dict):
            ids, features = ids["ids"], ids["features"]
        elif features is None:
            ids, features = ids
        return ops.cast(ops.cast(ids, "int32"), "float32"), features * 1.0


@pytest.mark.parametrize("form", ["list", "dict", "arguments", "keyword"])
def test_inputs_in_lists_dictionaries_and_keywords_are_not_rounded(form, half):
    model = TwoInputs()
    arguments, keywords = {
        "list": (([IDS, LARGE],), {}),
        "dict": (({"ids": IDS, "features": LARGE},), {}),
        "arguments": ((IDS, LARGE), {}),
        "keyword": ((IDS,), {"features": LARGE}),
    }[form]
    for _ in range(2):  # The first call, which builds, and another.
        ids, features = model(*arguments, **keywords)
        assert np.array_equal(array(ids), IDS)
        assert np.array_equal(array(features), LARGE)
        assert dtype_of(features) == "float32"
    if form in ("list", "dict"):
        ids, features = model.predict(arguments[0], verbose=0)
        assert np.array_equal(ids, IDS) and np.array_equal(features, LARGE)


class TakesMask(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, x, mask=None):
        self.seen = mask
        return x


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_mask_on_an_input_is_kept(dtype, half):
    if dtype == "float64" and BACKEND == "jax":
        pytest.skip("JAX has no float64 here")
    takes = TakesMask()
    model = Chain([takes])
    x = ops.convert_to_tensor(LARGE.astype(dtype))
    mask = np.array([[True, False, True]] * 2)
    keras.src.backend.set_keras_mask(x, ops.convert_to_tensor(mask))
    for _ in range(2):
        model(x)
        assert np.array_equal(ops.convert_to_numpy(takes.seen), mask)
    model = in_sequential(layers.Masking(), takes)
    model(np.array([[[0.0], [1.0]]], "float32"))
    assert np.array_equal(ops.convert_to_numpy(takes.seen), [[False, True]])


@pytest.mark.parametrize(
    "name", ["subclassed", "sequential", "sequential in sequential"]
)
def test_a_saved_model_opens_as_one_that_does_not_round(name, half, tmp_path):
    model = MODELS[name](layers.Embedding(60000, 1), layers.Flatten(), layers.Dense(2))
    want = model.predict(IDS, verbose=0)
    model.save(tmp_path / "model.keras")
    keras_mp.set_global_policy("float32")
    opened = keras.models.load_model(tmp_path / "model.keras")
    assert np.array_equal(opened.predict(IDS, verbose=0), want)
    said, says = (
        [x.compute_dtype for x in m._flatten_layers() if not is_shell(x)]
        for m in (model, opened)
    )
    assert said == says and half in says


@pytest.mark.parametrize("model_of", [in_subclassed, in_sequential])
def test_a_converted_model_does_not_round_nor_one_converted_back(model_of):
    model = model_of(Rows())
    want = model.predict(IDS, verbose=0)
    for policy in ("mixed_float16", "mixed_bfloat16", "float32"):
        if policy in POLICIES:
            policy = type(keras_mp.Policy(policy))(float32=[Rows])
        keras_mp.convert(model, policy)
        assert np.array_equal(model.predict(IDS, verbose=0), want)
        assert np.array_equal(array(model(IDS)), want)
    assert dtype_of(model(IDS.astype("float64"))) == "float32"


def test_layers_that_are_no_models_still_cast_their_inputs(half):
    class Inputs(layers.Layer):
        def call(self, x):
            return x

    assert dtype_of(Inputs()(LARGE)) == half
    seen = []

    class Chained(Chain):
        def call(self, x):
            x = super().call(x)
            seen.append(dtype_of(x))
            return x

    Chained([Inputs()])(LARGE)
    assert set(seen) == {half}


def test_keras_own_policies_are_not_changed():
    model = Chain([Rows()], dtype="float32")
    assert np.array_equal(array(model(IDS)), IDS)
    assert dtype_of(Chain([TakesMask(dtype="float16")])(IDS)) == "float16"
    pure = Chain([TakesMask(dtype="float64")], dtype="float16")
    if BACKEND != "jax":
        assert np.array_equal(array(pure(IDS)), IDS.astype("float16").astype("float32"))


def test_a_preprocessing_layer_fed_by_half_precision_sees_no_raw_features(half):
    inputs = keras.Input((8, 8, 3))
    raw = layers.Resizing(6, 6)(layers.Rescaling(1 / 255)(inputs))
    hidden = layers.CenterCrop(2, 2)(layers.Resizing(4, 4)(layers.Conv2D(4, 3)(raw)))
    model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(hidden)))
    model.compile("sgd", "mse")
    dtypes = [layer.compute_dtype for layer in model.layers[1:6]]
    assert dtypes == ["float32", "float32", half, half, half]
    x = np.random.default_rng(0).uniform(0, 255, (2, 8, 8, 3)).astype("float32")
    before = array(model(x))
    keras_mp.convert(model, "float32")
    assert {layer.compute_dtype for layer in model.layers[1:]} == {"float32"}
    error = np.max(np.abs(array(model(x)) - before))
    assert 0 < error < 0.02 * np.max(np.abs(before))
    keras_mp.convert(model, f"mixed_{half}")
    np.testing.assert_array_equal(array(model(x)), before)


def test_raw_images_of_16_bits_are_not_rounded(half):
    resizing = layers.Resizing(4, 4)
    resizing(np.full((1, 8, 8, 3), 2**16 - 1, "uint16"))
    assert resizing.compute_dtype == "float32"


def test_who_asks_for_float32_by_class_gets_it_everywhere():
    policy = keras_mp.MixedFloat16(float32=[layers.Resizing])
    resizing = layers.Resizing(4, 4, dtype=policy)
    resizing(np.ones((1, 8, 8, 3), "float16"))
    assert resizing.compute_dtype == "float32"


@pytest.mark.skipif(BACKEND == "jax", reason="tf.data asks for TensorFlow alone")
def test_a_preprocessing_layer_within_tf_data_sees_raw_features(half):
    tf = pytest.importorskip("tensorflow")
    normalization = layers.Normalization(mean=[1e5] * 3, variance=[1e10] * 3)
    wanted = {normalization: (LARGE - 1e5) / 1e5, layers.Rescaling(1e-5): LARGE * 1e-5}
    dataset = tf.data.Dataset.from_tensor_slices(LARGE).batch(2)
    for layer, want in wanted.items():
        layer.build(LARGE.shape)  # Keras asks for it.
        (got,) = [x.numpy() for x in dataset.map(layer)]
        assert got.dtype == "float32"
        assert np.allclose(got, want, rtol=1e-5)
