"""OverflowBreakpoint saves the step that it should, and replay takes it once more."""

import importlib.util
import json
import os
import pathlib
import random
import runpy
import shutil

import keras
import numpy as np
import pytest
from backends import (
    BACKEND,
    Batches,
    Chained,
    loader,
    same_bits,
    scaling_model,
    state_of,
    tf_data,
    values,
)
from keras import layers, ops
from workplace import real, write

import keras_mp
import keras_mp_cli
import keras_mp_cli.backends
from keras_mp.backends import engine
from keras_mp.backends.train_step import next_calls
from keras_mp.callbacks import OverflowBreakpoint
from keras_mp.errors import BreakpointError
from keras_mp.tools.breakpoint import model_file, skipped_step
from keras_mp.tools.breakpoint import replay as replay_module
from keras_mp.tools.breakpoint.batch import batch_of, tensors_of
from keras_mp.tools.breakpoint.replay import replay
from keras_mp.tools.breakpoint.skipped_step import set_random_state

RANDOM = np.random.default_rng(0)
SIZE = 4
BATCHES = 5
POISONED = (1, 2, 3)  # Batches, and the third skip in a row is batch 3: step 4.
SCALE = 2.0**8


def data(poisoned=POISONED, batches=BATCHES):
    """Batches whose gradients overflow at the scale, though the loss is finite."""
    x = RANDOM.normal(size=(SIZE * batches, 3)).astype("float32") / 8
    y = RANDOM.normal(size=(SIZE * batches, 2)).astype("float32") / 8
    for batch in poisoned:
        x[of(batch)] *= 2e3
        y[of(batch)] *= 1e6
    return x, y


def of(batch):
    return slice(SIZE * batch, SIZE * (batch + 1))


X, Y = data()
# Under which a poisoned batch is saved at once.
AT_ONCE = data(poisoned=(0,), batches=1)
WAYS = {
    "eager": {"run_eagerly": True},
    "compiled": {"jit_compile": BACKEND == "jax"},  # On TensorFlow a graph.
    "four steps at once": {
        "jit_compile": BACKEND == "tensorflow",
        "steps_per_execution": 4,
    },
}
EAGER = WAYS["eager"]
if BACKEND == "torch":  # Keras has no steps_per_execution there, and no graphs.
    WAYS = {"eager": EAGER}
if BACKEND == "jax":  # The four steps are.
    del WAYS["eager"]
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def build(parts=(), **compile):
    keras.utils.set_random_seed(0)
    with keras_mp.policy_scope("mixed_float16"):
        inputs = keras.Input((3,), name="inputs")
        x = layers.Dense(4, name="hidden")(inputs)
        for part in parts:
            x = part()(x)
        model = keras.Model(inputs, layers.Dense(2, name="head")(x), name="model")
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    # Batches that overflow are to be skipped.
    optimizer = keras_mp.LossScaleOptimizer(optimizer, retake_steps=0)
    model.compile(optimizer, "mse", **(compile or EAGER))
    model.optimizer.dynamic_scale.assign(SCALE)
    return model


def random_parts():
    return [
        layers.BatchNormalization,
        lambda: layers.Dropout(0.5, name="unseeded"),
        lambda: layers.Dropout(0.5, seed=7, name="seeded"),
    ]


def fit(model, *callbacks, x=X, y=Y, **options):
    options = {"batch_size": SIZE, "verbose": 0, "shuffle": False} | options
    return model.fit(x, y, callbacks=list(callbacks), **options)


def scaling_of(model):
    return values(model.optimizer._loss_scaling.variables)


def facts(folder):
    return json.loads((folder / "breakpoint.json").read_text())


def arrays(folder):
    with np.load(folder / "batch.npz") as found:
        return dict(found)


def caught(folder, model, data=AT_ONCE, **options):
    """Fits a model whose first step is to be saved, and returns what was saved."""
    fit(model, OverflowBreakpoint(folder, skips=1), x=data[0], y=data[1], **options)
    return facts(folder)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs" / "overflow"


@pytest.fixture
def diagnosis():
    """For tests that look at it."""


with_diagnosis = pytest.mark.usefixtures("diagnosis")


@pytest.fixture(autouse=True)
def surroundings(request, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", BACKEND)
    if "diagnosis" not in request.fixturenames:  # It is most of the work.
        for module in (skipped_step, replay_module):
            monkeypatch.setattr(module, "diagnosed", lambda *args: "There is none.")


# Which step --------------------------------------------------------------------------


class Kept(keras.callbacks.Callback):
    """The state after the first four steps."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            self.state = state_of(self.model)


@with_diagnosis
@every_way
def test_the_nth_skip_in_a_row_is_saved_and_nothing_else_changes(way, folder):
    # Steps before it, in the same call of the train function and another, and after it.
    x, y = data(poisoned=(4, 5), batches=8)
    found = []
    for callback in (OverflowBreakpoint(folder, skips=2), Kept()):
        model = build(random_parts(), **way)
        history = fit(model, callback, x=x, y=y).history
        drawn = random.random(), np.random.random(), values([keras.random.normal((2,))])
        found.append((history, state_of(model) + scaling_of(model), repr(drawn)))
    (history, state, drawn), (plain_history, plain_state, plain_drawn) = found
    assert history == plain_history and drawn == plain_drawn
    assert same_bits(state, plain_state)

    saved = facts(folder)
    assert (saved["step"], saved["epoch"], saved["skips"]) == (6, 1, 2)
    assert saved["loss_scale"] == SCALE / 2
    batch = arrays(folder)
    assert same_bits([batch["x"], batch["y"]], [x[of(5)], y[of(5)]])
    opened = keras.models.load_model(folder / "model.keras")
    set_random_state(opened, dict(np.load(folder / "random_state.npz")))
    assert same_bits(state_of(opened), callback.state)
    assert float(opened.optimizer.loss_scale) == SCALE / 2
    assert int(opened.optimizer.consecutive_skips) == 1
    assert (folder / "diagnosis.json").exists()


def test_skips_that_are_not_in_a_row_change_nothing_not_even_the_train_function(folder):
    x, y = data(poisoned=(0, 1, 3, 4))
    model = build()
    fit(model, x=X[:SIZE], y=Y[:SIZE])
    function = model.train_function
    fit(model, OverflowBreakpoint(folder, skips=3), x=x, y=y)
    assert not folder.exists()
    assert model.train_function is function
    assert model not in next_calls


def test_skips_in_a_row_go_on_in_the_next_epoch_and_the_epoch_is_reported(folder):
    x, y = data(poisoned=(0, 3), batches=4)
    fit(build(), OverflowBreakpoint(folder, skips=2), x=x, y=y, epochs=3)
    saved = facts(folder)
    assert (saved["step"], saved["epoch"]) == (5, 2)
    assert same_bits([arrays(folder)["x"]], [x[of(0)]])


@pytest.mark.parametrize("skips", [1, 3])
def test_a_run_that_is_resumed_goes_on_counting(skips, folder, tmp_path):
    x, y = data(poisoned=(0, 1))
    model = build()
    fit(model, x=x[: 2 * SIZE], y=y[: 2 * SIZE])
    model.save(tmp_path / "model.keras")
    resumed = keras.models.load_model(tmp_path / "model.keras")
    fit(resumed, OverflowBreakpoint(folder, skips), x=x, y=y)
    saved = facts(folder)
    assert (saved["step"], saved["skips"], saved["loss_scale"]) == (3, 3, SCALE / 4)


def test_a_model_that_its_first_step_builds_is_saved_at_that_step(folder):
    with keras_mp.policy_scope("mixed_float16"):
        model = keras.Sequential([layers.Dense(4), layers.Dense(2)])
    model.compile("sgd", "mse", **EAGER)
    assert caught(folder, model)["loss_scale"] == 2.0**15
    opened = keras.models.load_model(folder / "model.keras")
    assert int(opened.optimizer.skipped_steps) == 0
    assert replay(folder).not_finite


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_it_is_saved_once_in_each_fit_with_one_line_beside_those_before(folder, capsys):
    folder.mkdir(parents=True)  # An empty one is free.
    model, watch = build(), OverflowBreakpoint(folder, skips=1)
    names, saved = ["overflow", "overflow-2", "overflow-3"], []
    for fits, name in enumerate(names):
        if fits == 2:  # A breakpoint does not keep the folder from being given again.
            watch = OverflowBreakpoint(folder, skips=1)
        model.optimizer.dynamic_scale.assign(SCALE)
        fit(model, watch, epochs=2)
        step = 2 * BATCHES * fits + 2
        (line,) = [x for x in capsys.readouterr().out.splitlines() if x]
        said = f"keras_mp: skipped steps in a row: 1. The last, step {step},"
        assert line.startswith(said)
        assert line.endswith(f"keras-mp replay {folder.with_name(name)}")
        assert facts(folder.with_name(name))["step"] == step
        saved.append(contents(folder))
    assert saved[0] == saved[1] == saved[2]
    assert sorted(os.listdir(folder.parent)) == names


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_an_optimizer_that_does_not_scale_is_left_alone(policy, folder):
    with keras_mp.policy_scope(policy):
        model = keras.Sequential([layers.Dense(2)])
    model.compile("sgd", "mse")
    caught_nothing = OverflowBreakpoint(folder, skips=1)
    fit(model, caught_nothing, x=X[of(0)] * np.nan, y=Y[of(0)])
    assert not folder.exists()


def test_it_is_saved_before_the_training_ends_as_diverged(folder):
    model = build()
    optimizer = keras_mp.LossScaleOptimizer("sgd", SCALE, max_consecutive_skips=2)
    model.compile(optimizer, "mse", **EAGER)
    with pytest.raises(keras_mp.TrainingDivergedError):
        fit(model, OverflowBreakpoint(folder, skips=2))
    assert facts(folder)["step"] == 3


def test_other_callbacks_stand_beside_it(folder, tmp_path):
    monitor = keras_mp.callbacks.LossScaleMonitor()
    checkpoint = keras.callbacks.ModelCheckpoint(
        tmp_path / "{epoch}-{batch}.keras", save_freq=1
    )
    model = build()
    history = fit(model, monitor, OverflowBreakpoint(folder), checkpoint).history
    assert history["skipped_steps"] == [3]
    assert facts(folder)["step"] == 4


# The data ----------------------------------------------------------------------------


@keras.saving.register_keras_serializable(package="tests_breakpoint")
class Maybe(layers.Layer):
    def call(self, left, right=None):
        return left if right is None else left + right

    def compute_output_spec(self, left, right=None):
        return keras.KerasTensor(left.shape, self.compute_dtype)


def dict_model():
    with keras_mp.policy_scope("mixed_float16"):
        inputs = {
            "left": keras.Input((3,), name="left"),
            "right": keras.Input((3,), name="right", optional=True),
        }
        x = layers.Dense(4, name="hidden")(Maybe()(**inputs))
        outputs = {"a": layers.Dense(2, name="a")(x), "b": layers.Dense(2, name="b")(x)}
        model = keras.Model(inputs, outputs)
    model.compile("sgd", {"a": "mse", "b": "mse"}, **EAGER)
    return model


def installed(name):
    return importlib.util.find_spec(name) is not None


WEIGHTS = np.array([1, 2, 3, 4], "float32")


def kinds_of_data():
    x, y = AT_ONCE
    pair = {"x": x, "y": y}
    all_three = {**pair, "sample_weight": WEIGHTS}
    nested = {"left": x, "right": x * 2}, {"a": y, "b": y * 2}
    names = ("x/left", "x/right", "y/a", "y/b")
    flat = dict(zip(names, (x, x * 2, y, y * 2), strict=True))
    yield "arrays", build, pair, pair
    yield "sample weights", build, all_three, all_three
    yield "a PyDataset", build, {"x": Batches((x, y, WEIGHTS))}, all_three
    yield "a generator", build, {"x": (b for b in [(x, y)]), "steps_per_epoch": 1}, pair
    arrays_of = dict(zip("xy", nested, strict=True))
    yield "dicts", dict_model, arrays_of, flat
    half = {"left": x, "right": None}, {"a": y, "b": y * 2}
    given = dict(zip("xy", half, strict=True))
    yield "a None", dict_model, given, {k: v for k, v in flat.items() if k != names[1]}
    yield "dicts of a PyDataset", dict_model, {"x": Batches(nested)}, flat
    if installed("torch"):
        yield "a DataLoader", build, {"x": loader(x, y, size=SIZE)}, pair
    if installed("tensorflow"):
        yield "tf.data", build, {"x": tf_data(x, y, WEIGHTS, size=SIZE)}, all_three


KINDS = list(kinds_of_data())


@pytest.mark.parametrize("kind", KINDS, ids=[kind[0] for kind in KINDS])
def test_every_kind_of_data_is_saved_and_replayed(kind, folder):
    _, make, options, expected = kind
    model = make()
    callbacks = [OverflowBreakpoint(folder, skips=1)]
    model.fit(**options, shuffle=False, verbose=0, callbacks=callbacks)
    found = arrays(folder)
    assert list(found) == list(expected)
    assert same_bits(found.values(), expected.values())
    assert list(replay(folder).not_finite) == not_finite(model)


def not_finite(model):
    """The paths that the optimizer reports, in the order of the variables."""
    reported = {line.path for line in model.optimizer.nonfinite_report()}
    return [v.path for v in model.trainable_variables if v.path in reported]


def test_class_weights_are_saved_as_the_sample_weights_that_they_are(folder):
    with keras_mp.policy_scope("mixed_float16"):
        model = keras.Sequential([layers.Dense(4), layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras_mp.LossScaleOptimizer("sgd", 2.0**24, retake_steps=0)
    model.compile(optimizer, loss, **EAGER)
    x, y = AT_ONCE[0], np.arange(SIZE) % 2
    caught(folder, model, (x, y), class_weight={0: 1.0, 1: 3.0})
    assert arrays(folder)["sample_weight"].tolist() == [1.0, 3.0, 1.0, 3.0]


def test_a_train_step_of_the_users_gets_the_batch_in_the_form_that_it_wants(folder):
    # It says `x, y = data`, and would not take three parts.
    with keras_mp.policy_scope("mixed_float16"):
        inputs = keras.Input((3,))
        x = layers.Dense(4, name="hidden")(inputs)
        model = scaling_model()(inputs, layers.Dense(2, name="head")(x))
    model.compile("sgd", "mse", **EAGER)
    assert caught(folder, model)["model"] == "model.keras"
    again = replay(folder, custom_objects={"CustomModel": type(model)})
    assert list(again.not_finite) == not_finite(model)


def test_batches_come_back_as_they_were():
    half = ops.cast(np.array([0.1, 2.0]), "bfloat16")
    batch = {"a": (half, None), "b": [np.arange(3), {7: np.float16(0.1)}]}, np.ones(1)
    found = tensors_of(batch_of(batch))
    keras.tree.assert_same_structure(found, batch)
    both = zip(keras.tree.flatten(found), keras.tree.flatten(batch), strict=True)
    for a, b in both:
        assert (a is None) == (b is None)
        if a is not None:
            dtypes = {keras.backend.standardize_dtype(x.dtype) for x in (a, b)}
            assert len(dtypes) == 1 or BACKEND == "jax"  # Which has no 64 bits.
            assert np.array_equal(*values([ops.cast(x, "float32") for x in (a, b)]))


def test_a_batch_is_a_copy():
    x = np.ones(3)
    batch = batch_of((ops.convert_to_tensor(x), x))
    x[:] = 0
    assert [array.tolist() for array in batch.arrays.values()] == [[1.0] * 3] * 2


@pytest.mark.skipif(BACKEND != "tensorflow", reason="tensors of TensorFlow's")
def test_texts_and_sparse_tensors_are_saved_and_ragged_ones_refused():
    import tensorflow as tf

    texts = tf.constant([["a", "bc"]])
    sparse = tf.sparse.from_dense([[0.0, 2.0]])
    found, dense = tensors_of(batch_of((texts, sparse)))
    assert found.numpy().tolist() == [[b"a", b"bc"]]
    assert dense.numpy().tolist() == [[0.0, 2.0]]
    with pytest.raises(TypeError, match="`x/0` is ragged"):
        batch_of(([tf.ragged.constant([[1.0], []])],))


# Once more ---------------------------------------------------------------------------


@keras.saving.register_keras_serializable(package="tests_breakpoint")
class Some(layers.Layer):
    """Chance decides which of its weights have a gradient, and that overflows."""

    def __init__(self, seed=None, **kwargs):
        super().__init__(**kwargs)
        self.dropout = layers.Dropout(0.5, seed=seed, dtype=self.dtype_policy)

    def build(self, shape):
        small = keras.initializers.Constant(1e-4)
        self.parts = [
            self.add_weight(shape=(), initializer=small, name=f"part_{i}")
            for i in range(16)
        ]

    def call(self, x, training=False):
        loud = ops.stack([ops.cast(part, x.dtype) for part in self.parts]) * 6e4
        return x * ops.cast(ops.sum(self.dropout(loud, training=training)), x.dtype)


@with_diagnosis
@pytest.mark.parametrize("seed", [None, 7])
def test_random_layers_draw_the_same_again(seed, folder):
    model = build([lambda: Some(seed, name="some")])
    saved = caught(folder, model, (X[of(0)], Y[of(0)]))
    assert 0 < len([path for path in saved["not_finite"] if "part" in path]) < 16
    keras.utils.set_random_seed(3)
    again = replay(folder)
    assert again.not_finite == saved["not_finite"]
    diagnosis = json.loads((folder / "diagnosis.json").read_text())
    ranges = [t["histogram"] for t in again.report.to_dict()["tensors"]]
    assert ranges == [t["histogram"] for t in diagnosis["tensors"]]


@with_diagnosis
def test_it_judges_at_the_scale_at_which_it_overflowed_and_says_what_happens(folder):
    model = build()
    fit(model, OverflowBreakpoint(folder))
    before = contents(folder)
    again = replay(folder)
    assert again.report.scale == SCALE / 4
    assert list(again.not_finite) == not_finite(model) == list(again.saved.not_finite)
    text = str(again)
    assert max(map(len, text.splitlines())) <= 80
    for words in (
        "step 4, in epoch 1, at loss scale 64, with 3 skipped in a row",
        "in the gradients of the same variables",
        str(again.report),
    ):
        assert words in text
    assert before == contents(folder)
    assert "<svg" in (folder / "diagnosis.html").read_text()


def test_a_step_that_does_not_overflow_here_is_said_to_be_fine(saved):
    change(saved, loss_scale=2.0**-20)
    again = replay(saved)
    assert again.not_finite == {}
    assert "it does not overflow" in str(again)


def change(folder, **changes):
    file = folder / "breakpoint.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@with_diagnosis
def test_without_a_diagnosis_the_rest_is_saved_and_the_reason(folder, monkeypatch):
    def diagnose(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(skipped_step, "diagnose", diagnose)
    model = build()
    fit(model, OverflowBreakpoint(folder))
    assert "RuntimeError: out of memory" in (folder / "diagnosis.txt").read_text()
    assert not (folder / "diagnosis.json").exists()
    again = replay(folder)
    assert list(again.not_finite) == not_finite(model)
    assert "out of memory" in str(again)


# A model that no file can hold -------------------------------------------------------


def build_own():
    head = layers.Dense(2, name="head", dtype="float32")
    with keras_mp.policy_scope("mixed_float16"):
        model = Chained([layers.Dense(4, name="hidden"), head], name="own")
    model.compile("adam", "mse", **EAGER)
    return model


def build_lambda():
    return build([lambda: layers.Lambda(lambda x: x * 2, name="twice")])


@pytest.mark.parametrize("make", [build_own, build_lambda])
def test_of_a_model_that_no_file_can_hold_the_weights_are_saved(make, folder, capsys):
    model = make()
    model.fit(*AT_ONCE, verbose=0)  # Skipped, and it is built.
    saved = caught(folder, model)
    assert "model.keras" not in os.listdir(folder)
    line = " ".join(capsys.readouterr().out.split())
    assert f"keras-mp replay {folder} --script SCRIPT" in line and "`build()`" in line
    with pytest.raises(BreakpointError, match="holds weights alone: `--script"):
        replay(folder)
    again = replay(folder, build=make)
    assert again.not_finite == saved["not_finite"] != {}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: None, "must return a keras.Model"),
        (lambda: keras.Sequential([layers.Dense(2)]), "must return .* compiled"),
        (lambda: build(random_parts()), "cannot open|trainable variables"),
        (
            lambda: keras_mp.convert(build_lambda(), "float32"),
            "loss of the model must be scaled",
        ),
    ],
)
def test_a_build_of_another_model_is_refused(make, words, folder):
    caught(folder, build_lambda())
    with pytest.raises(BreakpointError, match=words):
        replay(folder, build=make)


# Where it is saved -------------------------------------------------------------------


@pytest.mark.parametrize("held", [["notes.txt"], ["breakpoint.json", "notes.txt"]])
def test_a_folder_with_something_else_in_it_is_refused(held, tmp_path):
    for name in held:
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match="which holds 'notes.txt'"):
        OverflowBreakpoint(tmp_path)
    watch = OverflowBreakpoint(tmp_path / "other")
    shutil.copytree(tmp_path, tmp_path / "other")
    with pytest.raises(ValueError, match="which holds 'notes.txt'"):
        fit(build(), watch)


def test_what_cannot_be_a_folder_is_refused_before_the_training(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="`folder` must be missing, empty"):
        OverflowBreakpoint(tmp_path / "file")
    path = tmp_path / "file" / "folder"
    message = f"`folder` must be where folders can be made: .*: '{path}'$"
    with pytest.raises((FileExistsError, NotADirectoryError), match=message):
        fit(build(), OverflowBreakpoint(path))
    mount = tmp_path / "mount"
    monkeypatch.setattr(pathlib.Path, "is_mount", lambda path: path == mount)
    with pytest.raises(ValueError, match="`folder` must not be a mount point"):
        fit(build(), OverflowBreakpoint(mount))
    with pytest.raises(TypeError):
        OverflowBreakpoint(None)


def test_a_folder_that_is_filled_meanwhile_stays_as_it_is(folder):
    class Filling(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            folder.mkdir()
            (folder / "notes.txt").touch()

    x, y = AT_ONCE
    with pytest.warns(UserWarning, match="which holds 'notes.txt'"):
        fit(build(), OverflowBreakpoint(folder, skips=1), Filling(), x=x, y=y)
    assert os.listdir(folder) == ["notes.txt"]
    assert os.listdir(folder.parent) == ["overflow"]


def test_what_cannot_be_written_is_reported_and_leaves_nothing_behind(
    saved, monkeypatch
):
    before = (saved / "breakpoint.json").read_bytes()

    def full(*args):
        raise OSError("no space left")

    monkeypatch.setattr(model_file, "save", full)
    with pytest.warns(UserWarning, match="OSError: no space left. The training goes"):
        fit(build(), OverflowBreakpoint(saved, skips=1))
    assert (saved / "breakpoint.json").read_bytes() == before
    assert os.listdir(saved.parent) == ["overflow"]


def test_a_relative_folder_is_where_it_was_when_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    watch, (x, y) = OverflowBreakpoint("here", skips=1), AT_ONCE
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    fit(build(), watch, x=x, y=y)
    assert (tmp_path / "here" / "breakpoint.json").exists()


@pytest.mark.parametrize("skips", [0, -1, 1.5, "3", None, True])
def test_skips_that_are_no_number_are_refused(skips, folder):
    with pytest.raises(ValueError, match="`skips` must be a whole number"):
        OverflowBreakpoint(folder, skips)


# What it leaves behind ---------------------------------------------------------------


class Failing(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 1:
            raise RuntimeError("in the middle")


class FailingData(Batches):
    def __getitem__(self, index):
        if index == 1:
            raise RuntimeError("in the middle")
        return super().__getitem__(index)


@pytest.mark.parametrize("failing", ["callback", "data"])
def test_after_an_exception_the_model_trains_on_as_without(failing, folder):
    found = []
    for callbacks in ([OverflowBreakpoint(folder, skips=1)], []):
        model = build()
        fit(model, x=X[:SIZE], y=Y[:SIZE])
        function = model.train_function
        with pytest.raises(Exception, match="in the middle"):
            if failing == "callback":
                fit(model, *callbacks, Failing())
            else:
                batches = FailingData(*[(X[of(i)], Y[of(i)]) for i in range(BATCHES)])
                model.fit(batches, verbose=0, shuffle=False, callbacks=callbacks)
        assert model.train_function is function
        fit(model, x=X[of(1)], y=Y[of(1)])
        model.train_on_batch(X, Y)
        found.append(state_of(model) + scaling_of(model))
        assert model not in next_calls
    assert same_bits(*found)
    assert not folder.exists()


def traces_of_its_train_step(model):
    traces, step = [], model.train_step

    def train_step(*args):
        traces.append(1)
        return step(*args)

    model.train_step = train_step
    return traces


@pytest.mark.skipif(BACKEND == "torch", reason="nothing is traced there")
def test_the_train_step_is_traced_as_often_as_without(folder):
    found = []
    for callbacks in ([OverflowBreakpoint(folder, skips=1)], []):
        model = build(**WAYS["compiled"])
        found.append(traces_of_its_train_step(model))
        fit(model, *callbacks, batch_size=3)  # The last batch is smaller.
    assert folder.exists()
    assert found[0] == found[1]


# More than one device ----------------------------------------------------------------


def test_several_replicas_or_processes_are_refused(folder, monkeypatch):
    model = build()
    if BACKEND == "tensorflow":
        from engine_tensorflow import mirrored

        with mirrored(2).scope():
            model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
            model.compile("sgd", "mse")
    elif BACKEND == "jax":
        import jax

        monkeypatch.setattr(jax, "process_count", lambda: 2)
    else:
        from torch import distributed

        store = distributed.HashStore()
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        assert engine.other_workers(model) == ""
        monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="must see the whole batch.*Received: "):
        fit(model, OverflowBreakpoint(folder))
    if BACKEND == "torch":
        distributed.destroy_process_group()


@pytest.mark.skipif(BACKEND != "jax", reason="keras.distribution is JAX's")
def test_the_devices_of_one_process_are_one(folder):
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    try:
        fit(build(**WAYS["compiled"]), OverflowBreakpoint(folder))
    finally:
        keras.distribution.set_distribution(None)
    assert same_bits([arrays(folder)["x"]], [X[of(3)]])
    assert replay(folder).not_finite


# keras-mp replay ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("template") / "overflow"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skipped_step, "diagnosed", lambda *args: "There is none.")
        caught(folder, build())
    return folder


@pytest.fixture
def saved(template, folder):
    shutil.copytree(template, folder)
    return folder


def refused(capsys, *args):
    with pytest.raises(SystemExit) as end:
        keras_mp_cli.main(["replay", *map(str, args)])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and not out
    (line,) = err.splitlines()
    return line.removeprefix("keras-mp: error: ")


def test_the_command_prints_it(saved, capsys):
    keras_mp_cli.main(["replay", str(saved)])
    assert capsys.readouterr().out == f"{replay(saved)}\n"


def test_where_nobody_asks_it_is_replayed_where_it_was_saved(saved, monkeypatch):
    command = keras_mp_cli.backends
    for backend in command.BACKENDS:
        monkeypatch.setattr(command, "find_spec", lambda name: True)
        monkeypatch.delenv("KERAS_BACKEND", raising=False)
        change(saved, backend=backend)
        saved_on = command.backend_of_breakpoint(str(saved))
        assert command.choose_backend(None, saved_on) == backend


def test_the_command_takes_classes_and_build_from_a_script(folder, capsys):
    caught(folder, build_lambda())
    script = folder.parent / "train.py"
    script.write_text(
        "import sys\n"
        f"sys.path.append({str(pathlib.Path(__file__).parent)!r})\n"
        "from test_overflow_breakpoint import build_lambda\n"
        "def build():\n"
        "    return build_lambda()\n"
        "assert __name__ != '__main__'\n"
    )
    keras_mp_cli.main(["replay", "--script", str(script), str(folder)])
    assert "overflows again" in " ".join(capsys.readouterr().out.split())
    line = refused(capsys, folder, "--script", "nothing.py")
    assert "cannot read the script 'nothing.py': there is no such file" in line


TRAIN = """
    import sys
    sys.path.append({tests!r})
    import keras
    import keras_mp
    from test_overflow_breakpoint import AT_ONCE, build as build_with, ops

    class Twice(keras.layers.Layer):
        def call(self, x):
            return x * 2

    class Own(keras.Model):
        def fit(self, *args, **kwargs):
            return super().fit(*args, **kwargs)

    model = build_with([Twice])
    watch = keras_mp.callbacks.OverflowBreakpoint("overflow", skips=1)
    x, y = AT_ONCE
    {ending}
    {after}
"""
FIT = "model.fit(x, y, callbacks=[watch], verbose=0)"
GRADIENTS = "[ops.zeros(v.shape) for v in model.trainable_variables]"
TRAININGS = {
    "fit": FIT,
    "fit of a class": FIT.replace("(x", "(model, x").replace("model", "keras.Model", 1),
    "fit within try": f"exec('try: {FIT}\\nexcept Exception: pass')",
    "fit of its own": "own = Own(model.input, model.output); own.compile('sgd'); "
    + FIT.replace("model", "own"),
    "train_on_batch": "model.train_on_batch(x, y)",
    "a loop": f"model.optimizer.apply({GRADIENTS}, model.trainable_variables)",
    "a loop without loss scaling": "optimizer = keras.optimizers.SGD(); "
    f"optimizer.apply({GRADIENTS}, model.trainable_variables)",
    "sys.exit": "sys.exit('usage: train.py EPOCHS')",
}


def train_script(folder, ending, after=""):
    """Writes a script that trains without asking whether it is __main__."""
    tests = str(pathlib.Path(__file__).parent)
    write(folder, {"train.py": TRAIN.format(tests=tests, ending=ending, after=after)})
    return str(folder / "train.py")


@pytest.fixture
def of_a_script(folder, monkeypatch):
    """A breakpoint of a model whose class is in a script, saved by that script."""
    script = train_script(folder.parent, FIT)
    monkeypatch.chdir(folder.parent)
    runpy.run_path(script, run_name="__main__")
    return folder


@pytest.mark.parametrize("ending", TRAININGS.values(), ids=TRAININGS)
def test_replay_runs_a_script_until_it_trains_or_exits(ending, of_a_script, capsys):
    before = contents(of_a_script)
    after = "open('trained', 'w'); model.save('model.keras')"
    script = train_script(of_a_script.parent, ending, after)
    capsys.readouterr()
    keras_mp_cli.main(["replay", "--script", script, str(of_a_script)])
    out, err = capsys.readouterr()
    assert "it overflows again" in " ".join(out.split())
    line = pathlib.Path(script).read_text().splitlines().index(ending) + 1
    why = "it exits" if "exit" in ending else "it trains"
    assert f"keras-mp: {script} is run up to line {line}, where {why};" in err
    assert contents(of_a_script) == before
    held = set(os.listdir(of_a_script.parent)) - {"__pycache__"}
    assert held == {"overflow", "train.py"}


def test_after_replay_models_train_again(of_a_script):
    script = train_script(of_a_script.parent, FIT)
    keras_mp_cli.main(["replay", "--script", script, str(of_a_script)])
    model = build()
    fit(model)
    assert int(model.optimizer.skipped_steps) == len(POISONED)


def test_a_class_that_is_not_found_names_the_script_as_the_remedy(of_a_script, capsys):
    capsys.readouterr()
    line = refused(capsys, of_a_script)
    assert "name the script that defines them: `--script SCRIPT`" in line
    assert "Could not locate class 'Twice'" in line


def test_what_is_no_breakpoint_is_one_line_and_status_2(tmp_path, capsys):
    assert "there is no folder" in refused(capsys, tmp_path / "nothing")
    assert "holds no breakpoint" in refused(capsys, tmp_path)


@pytest.mark.parametrize("text", [b"", b"PK damaged", b"[]"])
@pytest.mark.parametrize(
    "name", ["breakpoint.json", "batch.npz", "random_state.npz", "model.keras"]
)
def test_a_damaged_file_is_one_line_and_status_2(saved, name, text, capsys):
    (saved / name).write_bytes(text)
    line = refused(capsys, saved)
    assert name in line and ("is damaged" in line or "cannot open" in line)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "another"}, "format"),
        ({"model": "../model.keras"}, "model"),
        ({"batch": {"tuple": [{"array": "z", "dtype": "float32"}]}}, "batch"),
        ({"batch": 3}, "batch"),
        ({"batch": None}, "must have an `x`. Received: none"),
        ({"batch": {"tuple": [None, None]}}, "must have an `x`. Received: none"),
        ({"loss_scale": "high"}, "loss_scale"),
        ({"variables": 3}, "variables"),
        ({"variables": ["kernel"]}, "1 trainable variables"),
        ({"skips": None, "more": 1}, "more"),
    ],
)
def test_facts_that_do_not_fit_are_one_line_and_status_2(saved, changes, words, capsys):
    change(saved, **changes)
    assert words in refused(capsys, saved)


@with_diagnosis
@pytest.mark.slow("It starts another backend.")
def test_it_is_replayed_on_another_backend_with_classes_of_the_scripts(folder):
    others = ["tensorflow", "torch", "jax"]
    backend = next(b for b in others if b != BACKEND and installed(b))
    script = """
        import keras
        import keras_mp

        @keras.saving.register_keras_serializable(package="tests_breakpoint")
        class Twice(keras.layers.Layer):
            def call(self, x):
                return x * 2
    """
    write(folder.parent, {"classes.py": script})
    twice = runpy.run_path(str(folder.parent / "classes.py"))["Twice"]
    model = build([twice, lambda: layers.Dropout(0.1)])
    saved = caught(folder, model, (X, Y))
    args = ["overflow", "--backend", backend, "--script", "classes.py"]
    done = real("replay", *args, home=folder.parent)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert f"{BACKEND}, Keras" in text and f"Here, on {backend}: it overflows" in text
    assert f"loss scale {saved['loss_scale']:g}" in text
    assert "headroom" in text
