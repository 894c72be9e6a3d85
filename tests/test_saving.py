"""Files: what they keep, and who can open them."""

import json
import os
import subprocess
import sys
import warnings
import zipfile

import keras
import numpy as np
import pytest
from backends import computes, dtype_of, values

import keras_mp
from keras_mp import LossScaleOptimizer

layers = keras.layers

any_policy = pytest.mark.parametrize(
    "policy", ["float32", "mixed_bfloat16", "mixed_float16"]
)
RNG = np.random.default_rng(0)
X = RNG.normal(scale=0.5, size=(24, 3)).astype("float32")
Y = (X @ np.array([[0.5], [-0.5], [0.25]], "float32")).astype("float32")


def regression(policy="mixed_float16", depth=1, **compile_arguments):
    """Sequential, compiled; the same initial weights each time."""
    keras.utils.set_random_seed(1)
    with keras_mp.policy_scope(policy):
        hidden = [layers.Dense(3, activation="tanh") for _ in range(depth)]
        model = keras.Sequential([keras.Input((3,)), *hidden, layers.Dense(1)])
    model.compile(**{"optimizer": "adam", "loss": "mse", **compile_arguments})
    return model


def train(model, steps=3):
    """`steps` steps, the second of them poisoned: its gradients, not its loss."""
    for step in range(steps):
        x = X[8 * (step % 3) :][:8].copy()
        if step == 1:
            x[:, 0] = np.inf  # tanh makes it 1, whatever the weights.
        model.train_on_batch(x, Y[8 * (step % 3) :][:8])
    return model


def reopened(model, path, **kwargs):
    model.save(path)
    return keras.models.load_model(path, **kwargs)


COUNTERS = "loss_scale step_counter skipped_steps consecutive_skips iterations".split()


def state(model):
    return {name: float(getattr(model.optimizer, name)) for name in COUNTERS}


def assert_same(model, other):
    assert state(model) == state(other)
    assert_same_values(model.get_weights(), other.get_weights())
    inner, others = model.optimizer.inner_optimizer, other.optimizer.inner_optimizer
    assert type(inner) is type(others)
    assert_same_values(values(inner.variables), values(others.variables))


def assert_same_values(ours, others):
    for a, b in zip(ours, others, strict=True):
        np.testing.assert_array_equal(a, b)


THEIR_LAYERS = '''
import keras
from keras import layers


class Block(layers.Layer):
    """Layers made when it is created, and when it is built."""

    def __init__(self, units=2, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.early = layers.Dense(units, activation="tanh")

    def build(self, shape):
        self.late = layers.Dense(self.units, activation="relu")
        self.late.build((*shape[:-1], self.units))

    def call(self, x):
        return self.late(self.early(x))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


class Net(keras.Model):
    """A subclassed model whose layers take the global policy."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.block = Block(2)
        self.head = layers.Dense(3, activation="softmax")

    def call(self, x):
        return self.head(self.block(x))
'''
exec(THEIR_LAYERS)


# Scale, counters, inner optimizer -------------------------------------------------


def test_a_keras_file_keeps_scale_counters_and_inner_optimizer(tmp_path):
    model = train(regression())
    again = reopened(model, tmp_path / "model.keras")
    assert type(again.optimizer) is LossScaleOptimizer
    assert state(model) == {
        "loss_scale": 2.0**14,
        "step_counter": 1,
        "skipped_steps": 1,
        "consecutive_skips": 0,
        "iterations": 2,
    }
    assert_same(again, model)


def test_a_file_saved_in_the_middle_of_skips_remembers_them(tmp_path):
    model = train(regression(), steps=2)
    again = reopened(model, tmp_path / "model.keras")
    assert state(again)["consecutive_skips"] == 1
    assert not bool(again.optimizer.last_step_finite)
    assert_same(again, model)


def with_weights_of(model, path, again):
    model.save_weights(path)
    again.optimizer.build(again.trainable_variables)
    again.load_weights(path)
    return again


def test_a_weights_file_keeps_scale_counters_and_inner_optimizer(tmp_path):
    model = train(regression())
    again = with_weights_of(model, tmp_path / "model.weights.h5", regression())
    assert_same(again, model)


def test_a_weights_file_may_be_loaded_before_compile(tmp_path):
    model = train(regression())
    model.save_weights(tmp_path / "model.weights.h5")
    again = keras.models.clone_model(model)
    again.load_weights(tmp_path / "model.weights.h5")
    assert_same_values(again.get_weights(), model.get_weights())


def test_a_model_that_was_never_trained_can_be_reopened(tmp_path):
    again = train(reopened(regression(), tmp_path / "model.keras"))
    assert_same(again, train(regression()))


@any_policy
def test_reopened_under_any_global_policy_it_trains_on_as_if_never_closed(
    tmp_path, policy
):
    model = train(regression())
    keras_mp.set_global_policy(policy)
    again = reopened(model, tmp_path / "model.keras")
    assert computes(again) == ["float16", "float32"]
    assert again.outputs[0].dtype == "float32"
    assert_same(train(again), train(model))


@any_policy
def test_a_float32_model_stays_one_under_any_global_policy(tmp_path, policy):
    model = train(regression("float32"), steps=1)
    keras_mp.set_global_policy(policy)
    again = reopened(model, tmp_path / "model.keras")
    assert computes(again) == ["float32", "float32"]
    assert isinstance(again.optimizer, keras.optimizers.Adam)
    assert_same_values(
        values(again.optimizer.variables), values(model.optimizer.variables)
    )


def names(model):
    return [layer.dtype_policy.name for layer in model.layers]


def test_what_was_said_for_a_layer_is_still_so(tmp_path):
    with keras_mp.policy_scope(keras_mp.MixedFloat16(float32=[layers.Dense])):
        stack = layers.Dense(2), layers.Activation("tanh")
        last = layers.Dense(1, dtype="mixed_float16")
        model = keras.Sequential([keras.Input((3,)), *stack, last])
    model.compile("sgd", "mse")
    chosen = names(model)
    assert chosen == ["float32", "mixed_float16", "mixed_float16"]
    again = reopened(model, tmp_path / "model.keras")
    assert names(again) == chosen
    keras_mp.set_global_policy("mixed_float16")
    assert names(keras.models.clone_model(again)) == chosen


def test_a_part_of_an_opened_model_returns_float32_once_it_is_converted(tmp_path):
    opened = reopened(regression(), tmp_path / "model.keras")
    encoder = keras.Model(opened.inputs[0], opened.layers[0].output)
    assert dtype_of(encoder(X)) == "float16"  # A file does not say who chose that.
    keras_mp.convert(encoder, "mixed_float16")
    assert dtype_of(encoder(X)) == dtype_of(opened(X)) == "float32"


@any_policy
def test_a_subclassed_model_trains_on_under_any_global_policy(tmp_path, policy):
    with keras_mp.policy_scope("mixed_float16"):
        model = Net()  # noqa: F821
        model.compile("adam", "sparse_categorical_crossentropy")
        model.train_on_batch(X[:8], np.arange(8) % 3)
    model.optimizer.dynamic_scale.assign(256.0)
    keras_mp.set_global_policy(policy)
    custom = {"Net": Net, "Block": Block}  # noqa: F821
    again = reopened(model, tmp_path / "model.keras", custom_objects=custom)
    assert_same(again, model)
    again.train_on_batch(X[:8], np.arange(8) % 3)
    assert state(again)["iterations"] == 2
    assert state(again)["loss_scale"] == 256.0


# compile, before and after --------------------------------------------------------


def test_auto_scale_loss_false_is_kept(tmp_path):
    model = regression(auto_scale_loss=False)
    model.train_on_batch(X[:8], Y[:8])
    again = reopened(model, tmp_path / "model.keras")
    adam = again.optimizer
    assert isinstance(adam, keras.optimizers.Adam)
    again.train_on_batch(X[:8], Y[:8])
    assert again.optimizer is adam
    assert int(adam.iterations) == 2
    twice = reopened(again, tmp_path / "again.keras")
    assert isinstance(twice.optimizer, keras.optimizers.Adam)


@pytest.mark.parametrize("which", ["wrapper", "inner"])
def test_a_later_compile_with_the_same_optimizer_keeps_what_it_had(tmp_path, which):
    model = train(regression())
    again = reopened(model, tmp_path / "model.keras")
    optimizer = again.optimizer
    again.compile(optimizer if which == "wrapper" else optimizer.inner_optimizer, "mae")
    assert again.optimizer is optimizer
    assert_same(again, model)
    train(again)
    assert state(again)["iterations"] == 4


def test_a_model_reopened_without_compile_scales_when_it_is_compiled(tmp_path):
    model = train(regression())
    again = reopened(model, tmp_path / "model.keras", compile=False)
    assert_same_values(again.get_weights(), model.get_weights())
    again.compile("adam", "mse")
    assert type(again.optimizer) is LossScaleOptimizer
    train(again)


ARGUMENTS = {
    "dynamic": {
        "initial_scale": 1024.0,
        "dynamic_growth_steps": 7,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "min_scale": 0.5,
        "max_scale": 2.0**20,
        "hysteresis": 2,
        "max_consecutive_skips": 50,
        "name": "my_scaler",
    },
    "static": {"initial_scale": 128.0, "dynamic": False, "max_consecutive_skips": 50},
}


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_a_wrapper_with_arguments_of_its_own_survives(arguments, tmp_path):
    inner = keras.optimizers.Adam(0.01, global_clipnorm=1.0)
    model = train(regression(optimizer=LossScaleOptimizer(inner, **arguments)))
    again = reopened(model, tmp_path / "model.keras")
    assert type(again.optimizer) is LossScaleOptimizer
    assert again.optimizer.get_config() == model.optimizer.get_config()
    assert again.optimizer._loss_scaling.rule == model.optimizer._loss_scaling.rule
    assert again.optimizer.max_consecutive_skips == 50
    assert again.optimizer.inner_optimizer.global_clipnorm == 1.0
    assert_same(again, model)
    assert_same(train(again), train(model))


def test_the_wrapper_of_keras_stays_the_wrapper_of_keras(tmp_path):
    adam = keras.optimizers.Adam()
    theirs = keras.optimizers.LossScaleOptimizer(adam, initial_scale=64.0)
    model = regression(optimizer=theirs)
    model.train_on_batch(X[:8], Y[:8])
    again = reopened(model, tmp_path / "model.keras")
    assert type(again.optimizer) is keras.optimizers.LossScaleOptimizer
    assert float(again.optimizer.dynamic_scale) == 64.0


def test_a_model_checkpoint_of_fit_resumes(tmp_path):
    path, model = tmp_path / "best.keras", regression()
    checkpoint = keras.callbacks.ModelCheckpoint(path)
    model.fit(X, Y, batch_size=8, verbose=0, shuffle=False, callbacks=[checkpoint])
    assert_same(keras.models.load_model(path), model)


# A checkpoint saved before the optimizer was scaled, and one of another net -------


def test_a_file_of_float32_training_starts_a_scale_and_keeps_the_moments(tmp_path):
    model = train(regression("float32"), steps=1)
    again = with_weights_of(model, tmp_path / "model.weights.h5", regression())
    inner = again.optimizer.inner_optimizer
    assert_same_values(values(inner.variables), values(model.optimizer.variables))
    assert state(again)["loss_scale"] == 2.0**15


# Without keras_mp -----------------------------------------------------------------


def functional():
    inputs = keras.Input((3,))
    hidden = layers.Dense(4, activation="relu")(inputs)
    hidden = layers.BatchNormalization()(hidden)
    nested = keras.Sequential([layers.Dense(3), layers.Dense(2)])
    probability = layers.Dense(1, activation="sigmoid")(hidden)
    return keras.Model(inputs, [probability, nested(hidden) * 2.0])


def sequence():
    inputs = keras.Input((3,))
    x = layers.Reshape((3, 1))(inputs)
    x = layers.Bidirectional(layers.LSTM(2, return_sequences=True))(x)
    x = layers.MultiHeadAttention(1, 2)(x, x)
    return keras.Model(inputs, layers.TimeDistributed(layers.Dense(2))(x))


def classifier(*inputs):
    softmax = layers.Dense(3, activation="softmax")
    return keras.Sequential([*inputs, layers.Dense(2), softmax])


def policies_per_layer():
    ours = keras_mp.MixedFloat16(float32=[layers.LayerNormalization])
    stack = [
        layers.Dense(2, dtype=keras_mp.MixedBFloat16()),
        layers.LayerNormalization(dtype=ours),
        Block(dtype=ours),  # noqa: F821
        layers.Dense(3, activation="softmax", dtype=ours),
    ]
    return keras.Sequential([keras.Input((3,)), *stack])


def policies_of_a_map():
    policies = keras.dtype_policies.DTypePolicyMap(keras_mp.MixedFloat16())
    policies["mapped/full"] = keras.DTypePolicy("float32")
    stack = [layers.Dense(2, name=name, dtype=policies) for name in ("half", "full")]
    return keras.Sequential([keras.Input((3,)), *stack], name="mapped")


BUILDERS = {
    "functional": functional,
    "sequence": sequence,
    "sequential": lambda: classifier(keras.Input((3,))),
    "unbuilt_sequential": classifier,
    "policies_per_layer": policies_per_layer,
    "policies_of_a_map": policies_of_a_map,
    "net": lambda: Net(),  # noqa: F821
}
# A functional model has been called, symbolically, when it is made.
BUILT = ["new", "compiled"]
NOT_BUILT = ["new", "called", "compiled", "called_after_compile"]


def build(name, fate):
    with keras_mp.policy_scope("mixed_float16"):
        model = BUILDERS[name]()
        if fate == "called":
            model(X)
        if "compile" in fate:
            model.compile("adam", "mse")
        if fate == "called_after_compile":
            model(X)
    return model


OPEN = """
import sys
sys.modules["keras_mp"] = None  # Not installed here: to import it is an ImportError.
import json, warnings
warnings.simplefilter("ignore")
import keras, numpy as np
exec(open("their_layers.py").read())
x = np.load("x.npy")
results = {}
for name in json.load(open("names.json")):
    try:
        model = keras.models.load_model(
            name + ".keras", compile=False, custom_objects={"Net": Net, "Block": Block}
        )
        y = [keras.ops.convert_to_numpy(t) for t in keras.tree.flatten(model(x))]
        np.savez(name + ".npz", *y)
        results[name] = ""
    except Exception as error:
        results[name] = repr(error)[:2000]
try:
    keras.models.load_model("sequential.compiled.keras")
except Exception as error:
    results["opened compiled"] = str(error)
assert not [m for m in sys.modules if m.startswith("keras_mp.")]
json.dump(results, open("results.json", "w"))
"""


def run_without_keras_mp(script, folder):
    # The backend is in the environment; the working directory is not on the path.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["KERAS_BACKEND"] = keras.backend.backend()
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


CASES = [
    (name, fate)
    for name in BUILDERS
    for fate in (NOT_BUILT if name in ("unbuilt_sequential", "net") else BUILT)
]


@pytest.fixture(scope="module")
def opened_without(tmp_path_factory):
    """All models, saved; and what an interpreter without keras_mp made of them."""
    folder = tmp_path_factory.mktemp("without")
    models = {}
    for name, fate in CASES:
        models[f"{name}.{fate}"] = model = build(name, fate)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You are saving a model that has not yet")
            model.save(folder / f"{name}.{fate}.keras")
    np.save(folder / "x.npy", X)
    (folder / "their_layers.py").write_text(THEIR_LAYERS)
    (folder / "names.json").write_text(json.dumps(list(models)))
    run_without_keras_mp(OPEN, folder)
    return models, json.loads((folder / "results.json").read_text()), folder


@pytest.mark.parametrize(("name", "fate"), CASES)
@pytest.mark.sampled
def test_a_saved_model_names_nothing_of_ours_and_predicts_the_same_without_us(
    opened_without, name, fate
):
    models, errors, folder = opened_without
    with zipfile.ZipFile(folder / f"{name}.{fate}.keras") as file:
        config = json.loads(file.read("config.json"))
    config.pop("compile_config", None)
    assert "keras_mp" not in json.dumps(config)
    assert errors[f"{name}.{fate}"] == ""
    model = models[f"{name}.{fate}"]
    if not model.built:
        return  # It has no weights yet: there is nothing to predict.
    theirs = np.load(folder / f"{name}.{fate}.npz")
    ours = keras.tree.flatten(model(X))
    for a, b in zip(ours, theirs.values(), strict=True):
        # What a model of ours returns is float32, of the same values.
        assert dtype_of(a) in ("float32", b.dtype)
        # In a layer that makes layers without passing its dtype on, these take the
        # global policy, in Keras as well: there float32.
        atol = 5e-3 if name in ("net", "policies_per_layer") else 0
        if name == "sequence" and keras.backend.backend() == "jax":
            # On CPUs its attention is made in float32, and rounded once at the end: the
            # last bit of a float16 may differ, which is 2^-10 of it at most.
            atol = 2**-10 * np.abs(b).max()
        a = keras.ops.convert_to_numpy(a)
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def test_what_scaled_says_so_where_it_is_opened_compiled_without_keras_mp(
    opened_without,
):
    # Keras' own Adam would train it unscaled, in silence.
    assert "keras_mp" in opened_without[1]["opened compiled"]


# From Keras without keras_mp ------------------------------------------------------

SAVE = """
import sys
sys.modules["keras_mp"] = None
import keras, numpy as np
keras.config.set_dtype_policy("mixed_float16")
keras.utils.set_random_seed(1)
layers = keras.layers
model = keras.Sequential(
    [keras.Input((3,)), layers.Dense(3, activation="tanh"), layers.Dense(1)]
)
model.compile("adam", "mse")
x, y = np.load("x.npy"), np.load("y.npy")
model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer
model.optimizer.dynamic_scale.assign(512.0)
model.save("theirs.keras")
model.save_weights("theirs.weights.h5")
inner = model.optimizer.inner_optimizer
np.savez("inner.npz", *[v.numpy() for v in inner.variables])
np.savez("weights.npz", *model.get_weights())
np.save("finite_steps.npy", model.optimizer.step_counter.numpy())
"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theirs")
    np.save(folder / "x.npy", X)
    np.save(folder / "y.npy", Y)
    run_without_keras_mp(SAVE, folder)
    return folder


def assert_resumes(model, folder):
    assert type(model.optimizer) is LossScaleOptimizer
    assert state(model) == {
        "loss_scale": 512.0,
        "step_counter": int(np.load(folder / "finite_steps.npy")),
        "skipped_steps": 0,
        "consecutive_skips": 0,
        "iterations": 3,
    }
    assert_same_values(model.get_weights(), np.load(folder / "weights.npz").values())
    inner = values(model.optimizer.inner_optimizer.variables)
    assert_same_values(inner, np.load(folder / "inner.npz").values())
    train(model)
    assert state(model)["iterations"] == 5
    assert state(model)["skipped_steps"] == 1


@any_policy
@pytest.mark.usefixtures("installed")
def test_a_model_that_keras_itself_scaled_resumes_in_ours(theirs, policy):
    keras_mp.set_global_policy(policy)
    model = keras.models.load_model(theirs / "theirs.keras")
    assert computes(model) == ["float16", "float16"]
    assert_resumes(model, theirs)


def test_a_weights_file_that_keras_itself_saved_resumes_in_ours(theirs):
    model = regression()
    model.optimizer.build(model.trainable_variables)
    model.load_weights(theirs / "theirs.weights.h5")
    assert_resumes(model, theirs)
