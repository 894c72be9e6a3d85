"""What Keras does with policies goes on working through ours."""

import json
import zipfile

import keras
import numpy as np
import pytest
from backends import BACKEND, computes, dtype_of, same_bits, values
from test_conversion import dtypes_within, small

import keras_mp

layers = keras.layers
Map = keras.dtype_policies.DTypePolicyMap
X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
Y = np.ones((8, 2), "float32")


def computed_in(model):
    """What the first layer really returns."""
    with dtypes_within(model) as seen:
        model(X)
    return seen[id(model.layers[0])]


def trains(model):
    before = values(model.trainable_variables)
    model.compile("sgd", "mse")
    losses = model.fit(X, Y, epochs=2, verbose=0).history["loss"]
    moved = not same_bits(before, values(model.trainable_variables))
    return bool(np.all(np.isfinite(losses))) and moved


# DTypePolicyMap -------------------------------------------------------------------

MAPS = {
    "default ours": lambda: Map(keras_mp.MixedFloat16()),
    "entry ours": lambda: Map("float32", {"small/hidden": keras_mp.MixedFloat16()}),
    "entry of Keras": lambda: Map(
        "float32", {"small/hidden": keras.DTypePolicy("mixed_float16")}
    ),
    "entry float32": lambda: Map(
        keras_mp.MixedFloat16(), {"small/head": keras.DTypePolicy("float32")}
    ),
}


def model_under(policy, how, build=small):
    if how == "global":
        with keras_mp.policy_scope(policy):
            return build()
    if how == "per layer":
        return build(dtype=policy)
    return keras_mp.convert(build(), policy)


every_map = pytest.mark.parametrize("name", MAPS)
every_way = pytest.mark.parametrize("how", ["global", "per layer", "converted"])


@every_map
@every_way
@pytest.mark.sampled
@pytest.mark.usefixtures("installed")
def test_a_map_says_by_its_paths_what_layers_compute_in(how, name):
    model = model_under(MAPS[name](), how)
    assert computes(model)[0] == computed_in(model) == "float16"
    assert trains(model)
    assert computes(model) == ["float16", "float32"]
    assert isinstance(model.optimizer, keras_mp.LossScaleOptimizer)


@every_map
@every_way
@pytest.mark.usefixtures("installed")
def test_files_of_a_map_hold_stock_policies(how, name, tmp_path):
    model = model_under(MAPS[name](), how)
    want = model.predict(X, verbose=0)
    model.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as file:
        config = file.read("config.json").decode()
    assert "keras_mp" not in config and "Mixed" not in config
    opened = keras.models.load_model(tmp_path / "model.keras")
    assert computes(opened) == computes(model)
    # In a file nothing tells what a policy of ours has chosen: what the opened model
    # returns is not cast.
    found = opened.predict(X, verbose=0).astype("float32")
    assert same_bits([want.astype("float32")], [found])


# Quantization and LoRA ------------------------------------------------------------


says_nothing_of_inputs = pytest.mark.filterwarnings(
    # Keras tries to quantize the InputLayer of any model, and says so.
    "ignore:Layer InputLayer does not have a `quantize` method:UserWarning"
)


@says_nothing_of_inputs
def test_keras_refuses_int8_on_float16_layers_of_converted_models_too():
    model = keras_mp.convert(small(), "mixed_float16")
    with pytest.raises(ValueError, match="mode='int8' doesn't work well with"):
        model.quantize("int8")


@says_nothing_of_inputs
@pytest.mark.parametrize(
    "mode, policy",
    [
        ("int8", "mixed_bfloat16"),
        ("float8", "mixed_bfloat16"),
        ("float8", "mixed_float16"),
    ],
)
def test_a_converted_model_is_quantized_and_trains_in_float8(mode, policy):
    model = small()
    want = model.predict(X, verbose=0)
    keras_mp.convert(model, policy)
    model.quantize(mode)
    assert [x.quantization_mode for x in model.layers] == [mode] * 2
    got = model.predict(X, verbose=0)
    assert np.max(np.abs(want - got)) < 0.1 * np.max(np.abs(want))
    assert computes(model) == [policy.removeprefix("mixed_"), "float32"]
    if mode == "float8":
        assert trains(model)


@says_nothing_of_inputs
def test_a_quantized_model_is_not_converted_and_can_be_saved(tmp_path):
    model = small()
    model.quantize("int8")
    want = model.predict(X, verbose=0)
    keras_mp.convert(model, "mixed_float16")
    assert same_bits([want], [model.predict(X, verbose=0)])
    model.save(tmp_path / "model.keras")
    opened = keras.models.load_model(tmp_path / "model.keras")
    assert same_bits([want], [opened.predict(X, verbose=0)])


@pytest.mark.parametrize("when", ["before", "after"])
def test_lora_is_enabled_before_a_conversion_and_after_it(when):
    model = small()
    if when == "before":
        model.layers[0].enable_lora(2)
    keras_mp.convert(model, "mixed_float16")
    if when == "after":
        model.layers[0].enable_lora(2)
    lora = [model.layers[0].lora_kernel_a, model.layers[0].lora_kernel_b]
    assert [v.dtype for v in lora] == ["float32"] * 2
    frozen = values([model.layers[0]._kernel])
    assert trains(model)
    assert same_bits(frozen, values([model.layers[0]._kernel]))
    assert computed_in(model) == "float16"
    keras_mp.convert(model, "float32")
    assert dtype_of(model.layers[0](X)) == "float32"


# Copies ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["converted", "global"])
def test_a_clone_computes_as_its_model_does(how):
    model = model_under("mixed_float16", how)
    if how == "global":
        model(X)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    assert same_bits([model.predict(X, verbose=0)], [clone.predict(X, verbose=0)])
    assert computes(clone) == computes(model)
    assert trains(clone)
    assert computes(clone) == ["float16", "float32"]
    assert isinstance(clone.optimizer, keras_mp.LossScaleOptimizer)


def test_a_model_is_made_of_its_json():
    model = keras_mp.convert(small(), "mixed_bfloat16")
    text = model.to_json()
    assert "keras_mp" not in text and json.loads(text)
    assert computes(keras.models.model_from_json(text)) == ["bfloat16", "float32"]


@pytest.mark.skipif(
    BACKEND == "tensorflow",
    reason="under its own policies too Keras cannot call a model within a scope in fit",
)
def test_a_remat_scope_leaves_the_precision_alone():
    with keras.RematScope(mode="full"):
        plain = small()
        half = model_under("mixed_float16", "global")
        keras_mp.convert(plain, "mixed_float16")
    for model in (plain, half):
        assert trains(model)
        assert computes(model) == ["float16", "float32"]


# Export ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.filterwarnings("ignore")  # Of TensorFlow and torch while they export.
def test_a_converted_model_is_exported_as_a_saved_model(policy, tmp_path):
    tf = pytest.importorskip("tensorflow")
    if BACKEND == "torch":
        pytest.skip("Keras asks for litert_torch or torch_xla there")
    model = keras_mp.convert(small(), policy)
    want = model.predict(X, verbose=0)
    model.export(tmp_path / "saved", format="tf_saved_model", verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    served = loaded.serve(tf.constant(X))
    assert np.max(np.abs(want - served.numpy())) < 0.02 * np.max(np.abs(want))
    assert served.dtype == "float32"


@pytest.mark.filterwarnings("ignore")  # Of the exporters.
def test_a_converted_model_is_exported_to_onnx(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    if BACKEND == "jax":
        pytest.importorskip("jax2onnx")  # Keras asks for it there.
    model = keras_mp.convert(small(), "mixed_float16")
    want = model.predict(X, verbose=0)
    model(X)  # Keras asks for a call outside of a trace.
    path = str(tmp_path / "model.onnx")
    model.export(path, format="onnx", verbose=False)
    session = onnxruntime.InferenceSession(path)
    (got,) = session.run(None, {session.get_inputs()[0].name: X})
    assert got.dtype == "float32"
    assert np.max(np.abs(want - got)) < 4 * 2.0**-11 * np.max(np.abs(want))


# keras_tuner ----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # Of keras_tuner, at its import.
@pytest.mark.trains_many
def test_a_tuner_searches_over_converted_models(tmp_path):
    keras_tuner = pytest.importorskip("keras_tuner")
    if BACKEND == "tensorflow":
        pytest.importorskip("tensorboard")  # It asks for it there.

    def build(hp):
        model = small()
        model.compile(keras.optimizers.SGD(hp.Choice("rate", [1e-2, 1e-3])), "mse")
        return keras_mp.convert(model, hp.Choice("policy", ["mixed_float16"]))

    tuner = keras_tuner.RandomSearch(
        build, objective="loss", max_trials=2, directory=tmp_path, overwrite=True
    )
    tuner.search(X, Y, epochs=3, verbose=0)
    best = tuner.get_best_models()[0]
    assert computes(best) == ["float16", "float32"]
    assert isinstance(best.optimizer, keras_mp.LossScaleOptimizer)
    assert np.all(np.isfinite(best.predict(X, verbose=0)))


# Losses of layers -----------------------------------------------------------------


class AddsLoss(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        self.add_loss([keras.ops.mean(x) * 0, keras.ops.mean(x * 0)])
        return x


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("how", ["global", "converted"])
def test_losses_that_half_layers_add_are_summed_in_float32(how, policy):
    def build():
        regular = layers.Dense(4, activity_regularizer="l2")
        activity = layers.ActivityRegularization(l1=0.01)
        head = layers.Dense(2, kernel_regularizer="l2")
        return keras.Sequential(
            [keras.Input((3,)), regular, AddsLoss(), activity, head]
        )

    model = model_under(policy, how, build)
    full = build()
    full.set_weights(model.get_weights())
    assert trains(model)
    losses = [loss for loss in model.losses if hasattr(loss, "dtype")]
    assert {dtype_of(loss) for loss in losses} == {"float32"}
    model.set_weights(full.get_weights())
    full.compile("sgd", "mse")
    want, got = (m.evaluate(X, Y, verbose=0) for m in (full, model))
    assert abs(want - got) < 8 * 2.0 ** (-8 if "bfloat16" in policy else -11) * want
