"""The import patches nothing; whoever asks for half precision brings the seams.

Each callable of Keras, and of what JAX does with cuDNN, is compared by identity.
"""

import copy
import json
import pickle
import subprocess
import sys
import threading
import zipfile

import keras
import numpy as np
import pytest
from backends import POLICIES, dtype_of
from keras import layers, ops

import keras_mp
import keras_mp.keras_private as private
from keras_mp import installing, sharding, unseen, wanted

# They are skipped on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:.*whatever the loss scale:UserWarning")
X = np.linspace(-1, 1, 24, dtype="float32").reshape(8, 3)
Y = np.arange(8, dtype="int32") % 2
ADAM = keras.optimizers.Adam


def small(head="softmax", **options):
    hidden = layers.Dense(4, activation="relu", name="hidden", **options)
    return keras.Sequential(
        [keras.Input((3,)), hidden, layers.Dense(2, activation=head, name="head")]
    )


def train(model, **options):
    model.compile(ADAM(1e-2), "sparse_categorical_crossentropy", **options)
    model.fit(X, Y, verbose=0)
    return model


# What is patched ------------------------------------------------------------------

# In a process of its own: what has run before it might have patched something.
LOOK = """
import importlib, inspect, json, os, pkgutil, sys, warnings
warnings.simplefilter("ignore")
import keras, numpy as np
import keras.src.backend, keras.src.trainers.trainer
on_jax = keras.backend.backend() == "jax"
if on_jax:
    import jax._src.cudnn.fused_attention_stablehlo

def callables():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "keras" or name.startswith("jax._src.cudnn"):
            for key, value in list(vars(module).items()):
                if inspect.isclass(value):
                    owner = f"{value.__module__}.{value.__qualname__}"
                    for method, function in list(vars(value).items()):
                        if callable(function) and not method.startswith("_abc"):
                            found[f"{owner}.{method}"] = id(function)
                elif callable(value):
                    found[f"{name}:{key}"] = id(value)
    return found

def changed(before):
    now = callables()
    return sorted(name for name in before if now.get(name) != before[name])

x = np.ones((8, 16), "float32")

def used(policy=None):
    for head in ("softmax", None):
        model = keras.Sequential([
            keras.Input((16,)), keras.layers.Dense(4),
            keras.layers.BatchNormalization(), keras.layers.Dense(2, activation=head)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=head is None)
        model.compile("adam", loss)
        model.fit(x, np.zeros(8), verbose=0)
        model.predict(x, verbose=0)
        model.save("model.keras")
        keras.models.load_model("model.keras")
    q = keras.ops.ones((1, 8, 1, 16), keras.config.dtype_policy().compute_dtype)
    keras.ops.dot_product_attention(q, q, q)
    return model

used()  # Keras and its backend import more when they are used.
before = callables()
import keras_mp
found = {"import": changed(before)}
keras_mp.set_global_policy("float32")
with keras_mp.policy_scope("float32"):
    model = used()
keras_mp.inspect(model)
keras_mp.convert(model, "float32")
keras.config.set_dtype_policy("mixed_float16")  # Keras' own.
model = used()
found["no half precision of ours"] = changed(before)
scaler = type(model.optimizer)
keras_mp.set_global_policy("mixed_float16")
model = used()
if on_jax:
    keras_mp.diagnose(model, x, np.zeros(8), verbose=0)
found["asked for"] = changed(before)
keras_mp.uninstall()
found["uninstall"] = changed(before)
found["scaler of Keras"] = scaler is keras.optimizers.LossScaleOptimizer
found["policy"] = [type(keras.config.dtype_policy()) is keras.DTypePolicy,
                   keras.config.dtype_policy().name]
json.dump(found, open("found.json", "w"))
"""


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("patched")
    done = subprocess.run(
        [sys.executable, "-c", LOOK], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


def test_the_import_and_float32_patch_nothing(patched):
    assert patched["import"] == patched["no half precision of ours"] == []
    assert patched["scaler of Keras"]


def test_uninstall_gives_everything_back(patched):
    assert len(patched["asked for"]) > 20
    assert patched["uninstall"] == []
    assert patched["policy"] == [True, "mixed_float16"]


# The doors ------------------------------------------------------------------------


def a_layer():
    """A layer under a policy of ours."""
    return layers.Dense(2, dtype=keras_mp.MixedFloat16())


def a_file(path, model=None):
    """The path of a file of ours, in a process that has asked for nothing."""
    with keras_mp.policy_scope("mixed_float16"):
        model = train(small())
    model.save(path)
    keras_mp.uninstall()
    return path


def a_map():
    return keras.dtype_policies.DTypePolicyMap("float32", {"a": "mixed_float16"})


def scoped():
    with keras_mp.policy_scope("mixed_bfloat16"):
        pass


# What it needs, made before -> what asks.
DOORS = {
    "the global policy": lambda _: keras_mp.set_global_policy("mixed_float16"),
    "a stock one": lambda _: keras_mp.set_global_policy(
        keras.DTypePolicy("mixed_float16")
    ),
    "a map": lambda _: keras_mp.set_global_policy(a_map()),
    "auto": lambda _: keras_mp.set_global_policy("auto"),
    "float16": lambda _: keras_mp.set_global_policy(keras.DTypePolicy("float16")),
    "a scope": lambda _: scoped(),
    "Policy": lambda _: keras_mp.Policy("bfloat16"),
    "a policy's class": lambda _: keras_mp.MixedBFloat16(),
    "a copy of a policy": copy.copy,
    "a pickled policy": lambda made: pickle.loads(pickle.dumps(made)),
    "convert": lambda made: keras_mp.convert(small(), "mixed_float16"),
    "LossScaleOptimizer": lambda _: keras_mp.LossScaleOptimizer("adam"),
    "StochasticRoundingOptimizer": lambda _: keras_mp.StochasticRoundingOptimizer(
        "adam", "bfloat16"
    ),
    "diagnose": lambda _: keras_mp.diagnose(train(small()), X, Y, verbose=0),
}


@pytest.mark.parametrize("door", DOORS)
def test_who_asks_for_half_precision_brings_the_seams(door):
    made = keras_mp.MixedFloat16()
    keras_mp.uninstall()
    for _ in range(2):  # After `uninstall` the same doors install again.
        assert not wanted.done and not is_in()
        DOORS[door](made)
        assert wanted.done and is_in()
        keras_mp.uninstall()


def is_in():
    return hasattr(layers.Layer.__call__, "_keras_mp_original")


def test_a_file_and_a_pickle_do_so_too(tmp_path):
    path = a_file(tmp_path / "model.keras")
    keras.models.load_model(path)
    assert is_in()
    with keras_mp.policy_scope("mixed_float16"):
        model = train(small())
    pickled = pickle.dumps(model)
    keras_mp.uninstall()
    pickle.loads(pickled)
    assert is_in()


def test_sharding_brings_seams_of_its_own(monkeypatch):
    monkeypatch.setattr(wanted, "shards", False)
    monkeypatch.setattr(sharding.engine, "fully_shard", lambda *args: None)
    keras_mp.install()
    save = keras.Model.save
    assert not hasattr(save, "_keras_mp_original")
    keras_mp.fully_shard(small())
    assert hasattr(keras.Model.save, "_keras_mp_original")
    keras_mp.uninstall()
    assert keras.Model.save is save


WRONG = {
    "a name": lambda: keras_mp.set_global_policy("mixed_float61"),
    "a scope": lambda: keras_mp.policy_scope("half").__enter__(),
    "float32": lambda: keras_mp.MixedFloat16(float32="dense"),
    "an optimizer": lambda: keras_mp.LossScaleOptimizer(3),
    "a scale": lambda: keras_mp.LossScaleOptimizer("adam", initial_scale=-1.0),
    "slots": lambda: keras_mp.StochasticRoundingOptimizer("adam", "float16"),
    "a model": lambda: keras_mp.convert("model", "mixed_float16"),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_what_is_refused_asks_for_nothing(call):
    with pytest.raises((TypeError, ValueError)):
        call()
    assert not is_in()


def test_float32_asks_for_nothing():
    keras_mp.set_global_policy("float32")
    with keras_mp.policy_scope("float32"):
        model = train(small())
    keras_mp.convert(model, "float32")
    keras_mp.inspect(model)
    keras_mp.recommended_policy()
    model.fit(X, Y, verbose=0, callbacks=[keras_mp.callbacks.LossScaleMonitor()])
    assert not is_in()


def test_threads_that_ask_at_once_find_all_of_it():
    seen = []
    start = threading.Barrier(8)

    def ask():
        start.wait()
        keras_mp.MixedFloat16()
        seen.append(
            all(is_wrapped(*place[:2]) for place in installing._places(wanted.kernels))
        )

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 8


def is_wrapped(owner, name):
    return hasattr(vars(owner)[name], "_keras_mp_original")


# Traps: what a door opens too late for --------------------------------------------


def in_a_new_process(tmp_path, script):
    """Runs a script that finds `model.keras`, and returns what it leaves as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


OPENED = """
import json, keras, keras_mp, numpy as np
model = keras.models.load_model("model.keras")
x = np.ones((8, *model.input_shape[1:]), "float32")
model.fit(x, np.zeros(8), verbose=0)
head = model.layers[-1]
from keras_mp.policies.choosing import decision_for
print(json.dumps([type(model.optimizer).__name__, model.loss,
    model.layers[-2].compute_dtype, str(keras.ops.dtype(model(x)))
    if hasattr(keras.ops, "dtype") else str(model(x).dtype).replace("torch.", ""),
    bool((decision_for(head) or [0]*4)[3])]))
"""


def test_a_file_says_that_its_model_was_scaled(tmp_path, mixed_float16):
    large = layers.Dense(300, activation="softmax", name="head")
    hidden = layers.Dense(1024, name="hidden")
    model = keras.Sequential([keras.Input((3,)), hidden, large])
    model.compile("adam", "sparse_categorical_crossentropy")
    assert isinstance(model.optimizer, keras_mp.LossScaleOptimizer)
    model.save(tmp_path / "model.keras")
    name, _, dtype, returned, is_head = in_a_new_process(tmp_path, OPENED)
    assert (name, dtype, returned) == ("LossScaleOptimizer", "float16", "float32")
    # The file is the first that asks: the mark of its large head is read all the same.
    assert is_head


class Subclassed(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.hidden = layers.Dense(4, activation="relu", name="hidden")
        self.head = layers.Dense(2, name="head")

    def call(self, x):
        return self.head(self.hidden(x))


class TwoInputs(Subclassed):
    def call(self, inputs):
        return super().call(inputs["a"] + ops.cast(inputs["b"], "float32"))


GIVEN = {
    Subclassed: X,
    TwoInputs: {"a": X, "b": X.astype("int32")},
}


@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_that_was_called_before_is_converted_like_any(kind, policy):
    model, x = kind(), GIVEN[kind]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    want = ops.convert_to_numpy(model(x))
    own = type(keras_mp.Policy(policy))
    keras_mp.uninstall()
    keras_mp.convert(model, own(float32=["hidden"]))
    assert model.hidden.compute_dtype == "float32"
    assert model.head.compute_dtype == "float32"  # What its loss reads.
    keras_mp.convert(model, policy)
    assert model.hidden.compute_dtype == POLICIES[policy]
    assert model.head.compute_dtype == "float32"
    found = ops.convert_to_numpy(model(x))
    assert found.dtype == "float32"
    np.testing.assert_allclose(found, want, atol=2e-2)


class OnlyFloat32(layers.Layer):
    """No framework raises such an error for dtypes: it is not called again."""

    def call(self, x):
        if keras.backend.standardize_dtype(x.dtype) != "float32":
            raise ArithmeticError("no kernel for so few bits")
        return x


class Refuses(Subclassed):
    def __init__(self):
        super().__init__()
        self.careful = OnlyFloat32()

    def call(self, x):
        return self.head(self.careful(self.hidden(x)))


def test_a_conversion_of_one_that_must_be_refused_is():
    model = Refuses()
    model(X)
    with pytest.raises(ValueError, match="OnlyFloat32.* raises"):
        keras_mp.convert(model, keras_mp.MixedFloat16(float32=["head"]))
    assert model.hidden.compute_dtype == "float32"


# Under a door of Keras' own making ------------------------------------------------


@pytest.mark.parametrize("way", ["fit", "train_on_batch"])
def test_compile_may_be_the_call_that_asks(way):
    x = X.copy()
    x[0] = np.inf
    model = keras.Sequential(
        [keras.Input((3,)), layers.BatchNormalization(), layers.Dense(2)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Python has looked `compile` up before it evaluates this.
    model.compile(keras_mp.LossScaleOptimizer("sgd", retake_steps=0), loss)
    statistics = [v.numpy() for v in model.layers[0].non_trainable_variables]
    getattr(model, way)(x, Y, **({"verbose": 0} if way == "fit" else {}))
    assert int(model.optimizer.skipped_steps) == 1
    for before, variable in zip(
        statistics, model.layers[0].non_trainable_variables, strict=True
    ):
        np.testing.assert_array_equal(before, variable.numpy())


class Asks(keras.Model):
    """Asks in the call of Keras' `__init__`, which Python has looked up before."""

    def __init__(self):
        super().__init__(dtype=keras_mp.MixedFloat16(float32=["careful"]))
        dtype = self.dtype_policy
        self.careful = layers.Dense(4, name="careful", dtype=dtype)
        self.hidden = layers.Dense(4, dtype=dtype)
        self.head = layers.Dense(2, activation="softmax", dtype=dtype)

    def call(self, x):
        return self.head(self.hidden(self.careful(x)))


def test_so_may_the_init_of_a_model():
    assert not is_in()
    model = train(Asks())
    assert isinstance(model.optimizer, keras_mp.LossScaleOptimizer)
    found = [x.compute_dtype for x in (model.careful, model.hidden, model.head)]
    assert found == ["float32", "float16", "float32"]
    assert dtype_of(model(X)) == "float32"


# Compiled before it is asked for --------------------------------------------------


def test_a_scaler_of_keras_that_was_made_before_scales():
    keras.config.set_dtype_policy("mixed_float16")
    model = small()
    scaler = keras.optimizers.LossScaleOptimizer(ADAM())
    model.compile(scaler, "sparse_categorical_crossentropy")
    keras_mp.convert(model, "mixed_float16")
    model.fit(X, Y, verbose=0)  # A warning that nothing is scaled would be an error.
    assert model.optimizer is scaler


def test_who_has_said_not_to_scale_is_not_scaled():
    keras.config.set_dtype_policy("mixed_float16")
    model = train(small(), auto_scale_loss=False)
    keras_mp.convert(model, "mixed_float16")
    model.fit(X, Y, verbose=0)
    assert type(model.optimizer) is type(ADAM())


def test_of_a_float32_model_keras_does_not_remember_it():
    # As `convert` says: compile it once more.
    model = train(small(), auto_scale_loss=False)
    keras_mp.convert(model, "mixed_float16")
    assert isinstance(model.optimizer, keras_mp.LossScaleOptimizer)
    model.compile("adam", "sparse_categorical_crossentropy", auto_scale_loss=False)
    assert not isinstance(model.optimizer, keras_mp.LossScaleOptimizer)


def test_what_is_made_up_for_changes_no_model():
    model = train(small())
    before = [x.dtype_policy for x in model.layers], model.get_weights()
    keras_mp.install()
    unseen.make_up(model)
    assert [x.dtype_policy for x in model.layers] == before[0]
    for a, b in zip(before[1], model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert type(model.optimizer) is type(ADAM())


# Names that were imported before --------------------------------------------------


def test_a_thread_may_ask_by_a_name_that_was_imported_before():
    early = keras.config.dtype_policy
    assert not is_in()
    keras_mp.set_global_policy("mixed_float16")
    found = []

    def ask():
        early()
        found.append(layers.Dense(2).compute_dtype)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found == ["float16"]
    assert keras_mp.global_policy() == keras_mp.MixedFloat16()
    keras.utils.clear_session(free_memory=False)
    early()
    assert keras_mp.global_policy() == keras_mp.MixedFloat16()


# After `uninstall` ----------------------------------------------------------------


def test_every_thread_has_keras_own_policy_afterwards():
    keras_mp.set_global_policy("mixed_float16")
    shown, out, found = threading.Event(), threading.Event(), []

    def look():
        layers.Dense(2)
        shown.set()
        out.wait()
        found.append(keras.config.dtype_policy())
        found.append(layers.Dense(2).dtype_policy)

    thread = threading.Thread(target=look)
    thread.start()
    shown.wait()
    keras_mp.uninstall()
    out.set()
    thread.join()
    for policy in (*found, keras.config.dtype_policy()):
        assert type(policy) is keras.DTypePolicy
        assert policy == keras.DTypePolicy("mixed_float16")


def test_what_was_set_before_does_not_come_back():
    keras_mp.set_global_policy("mixed_float16")
    keras_mp.uninstall()
    keras_mp.install()
    keras.utils.clear_session(free_memory=False)
    assert keras.config.dtype_policy().name == "float32"


def test_a_scope_that_is_under_way_ends_as_it_began():
    with keras_mp.policy_scope("mixed_float16"):
        keras_mp.uninstall()
        assert type(keras.config.dtype_policy()) is keras.DTypePolicy
        assert keras.config.dtype_policy().name == "mixed_float16"
    assert keras.config.dtype_policy().name == "float32"


def test_a_layer_that_was_not_called_yet_is_read_from_its_file(tmp_path):
    with keras_mp.policy_scope("mixed_float16"):
        model = keras.Sequential([layers.Dense(4), layers.Softmax()])
    keras_mp.uninstall()
    with pytest.warns(UserWarning, match="has not yet been built"):
        model.save(tmp_path / "model.keras")
    opened = keras.models.load_model(tmp_path / "model.keras")
    assert is_in()
    opened(X)
    assert [x.compute_dtype for x in opened.layers] == ["float16", "float32"]


def test_a_policy_that_was_made_before_asks_where_it_is_set():
    policy = keras_mp.MixedFloat16()
    keras_mp.uninstall()
    layers.Dense(2, dtype=policy)
    assert not is_in()
    keras_mp.set_global_policy(policy)
    assert is_in() and keras_mp.global_policy() is policy


def test_a_step_that_was_traced_without_the_seams_is_traced_again():
    with keras_mp.policy_scope("mixed_float16"):
        model = keras.Sequential(
            [keras.Input((3,)), layers.BatchNormalization(), layers.Dense(2)]
        )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras_mp.LossScaleOptimizer("sgd", retake_steps=0), loss)
    keras_mp.uninstall()
    model.fit(X, Y, verbose=0)
    keras_mp.install()
    x = X.copy()
    x[0] = np.inf
    before = [v.numpy() for v in model.layers[0].non_trainable_variables]
    model.fit(x, Y, verbose=0)
    assert int(model.optimizer.skipped_steps) == 1
    for value, variable in zip(
        before, model.layers[0].non_trainable_variables, strict=True
    ):
        np.testing.assert_array_equal(value, variable.numpy())


def test_a_model_without_a_graph_takes_arrays_afterwards():
    with keras_mp.policy_scope("mixed_float16"):
        model = train(Subclassed())
    keras_mp.uninstall()
    assert model(X).shape == (8, 2)
    keras_mp.install()
    model(X)
    assert not getattr(model, private.CONVERT_INPUTS)  # They keep their dtypes again.


# Fine as they are -----------------------------------------------------------------


def test_a_float32_model_that_has_trained_before_trains_on():
    model = train(small())
    step = model.train_function
    keras_mp.MixedFloat16()
    model.fit(X, Y, verbose=0)
    assert model.train_function is step


def test_a_get_config_of_the_users_class_that_was_defined_before(tmp_path):
    @keras.saving.register_keras_serializable(package="doors")
    class Own(keras.Model):
        def __init__(self, dtype=None, **kwargs):
            x = keras.Input((3,))
            y = layers.Dense(4, dtype=dtype)(x)
            super().__init__(x, layers.Softmax(dtype=dtype)(y), dtype=dtype, **kwargs)

        def get_config(self):
            return {"dtype": keras.dtype_policies.serialize(self.dtype_policy)}

    Own()
    assert not is_in()
    keras_mp.set_global_policy("mixed_float16")
    model = Own()
    model.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as file:
        assert "keras_mp>" not in file.read("config.json").decode()
    assert "storing_a_map" in Own.get_config.__code__.co_qualname
    keras_mp.uninstall()
    assert "storing_a_map" not in Own.get_config.__code__.co_qualname
