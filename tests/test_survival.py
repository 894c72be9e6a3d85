"""What a training survives: a kill, another backend, an older file, a damaged one."""

import importlib.util
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import zipfile

import h5py
import keras
import numpy as np
import pytest
from backends import BACKEND, Chained, same_bits, values

import keras_mp
from keras_mp import LossScaleOptimizer

TESTS = pathlib.Path(__file__).parent
DATA = TESTS / "data"
ROWS = 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(6 * ROWS, 4)).astype("float32")
Y = X[:, :1] - X[:, 1:2]
# The loss of the third batch is finite, its gradients times the scale are not.
OVERFLOWS = 2
Y[OVERFLOWS * ROWS : (OVERFLOWS + 1) * ROWS] = 1e5


def regression(optimizer="adam", **compile_arguments):
    keras.utils.set_random_seed(1)
    with keras_mp.policy_scope("mixed_float16"):
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(4, activation="tanh"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
    model.compile(optimizer, "mse", **compile_arguments)
    return model


def batch(index):
    rows = slice(index % 6 * ROWS, (index % 6 + 1) * ROWS)
    return X[rows], Y[rows]


def everything(model):
    """Weights, statistics, moments, averages, scale and counters, in this order."""
    inner = model.optimizer.inner_optimizer
    state = [
        *model.optimizer._loss_scaling.variables,
        model.optimizer._loss_scaling.nonfinite_counts,
    ]
    arrays = values([*model.variables, *inner.variables, *state])
    # A whole number has 32 bits on one backend, 64 on another.
    return [a if a.dtype.kind == "f" else a.astype("int64") for a in arrays]


def counters(optimizer):
    """Scale, finite steps, skipped, in a row, broken; and iterations."""
    state = [*optimizer._loss_scaling.variables, optimizer.iterations]
    return [float(v) for v in values(state)]


def child(backend, call):
    """Starts Python on a backend, to call a function of this file."""
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, "-c", f"import test_survival; test_survival.{call}"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process, code=0):
    _, errors = process.communicate()
    assert process.returncode == code, errors[-3000:]


# Killed, and started again --------------------------------------------------------

KILLED_IN, KILLED_AT = 1, 4


def backups(folder):
    return {
        name: keras.callbacks.BackupAndRestore(
            folder / name, save_freq=frequency, delete_checkpoint=False
        )
        for name, frequency in (("epoch", "epoch"), ("steps", 2))
    }


class Kill(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (KILLED_IN, KILLED_AT):
            os.kill(os.getpid(), signal.SIGKILL)


def fit(model, callbacks, x=X, y=Y, epochs=3):
    return model.fit(
        x, y, batch_size=ROWS, epochs=epochs, shuffle=False, verbose=0,
        callbacks=callbacks,
    )  # fmt: skip


def fit_and_be_killed(folder):
    keras_mp.set_global_policy("mixed_float16")
    fit(regression(), [*backups(pathlib.Path(folder)).values(), Kill()])


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """What fits come to that go on in this process, after another was killed."""
    folder, models = tmp_path_factory.mktemp("resumed"), {}
    ended(child(BACKEND, f"fit_and_be_killed({str(folder)!r})"), -signal.SIGKILL)
    with keras_mp.policy_scope("mixed_float16"):
        for name, backup in backups(folder).items():
            models[name] = regression()
            assert fit(models[name], [backup]).epoch == [1, 2]
    return {name: everything(model) for name, model in models.items()}


# Keras starts the interrupted epoch from its first batch: what was trained of it before
# the last backup, here four batches, comes again.
@pytest.mark.parametrize(("frequency", "before"), [("epoch", 6), ("steps", 10)])
@pytest.mark.slow("Each run is killed in a process of its own.")
def test_a_killed_run_goes_on_to_the_bit_as_if_never_killed(resumed, frequency, before):
    order = np.r_[0 : before * ROWS, 0 : 2 * 6 * ROWS] % (6 * ROWS)
    model = regression()
    fit(model, [], X[order], Y[order], epochs=1)
    scale, _, skipped, *_ = counters(model.optimizer)
    assert scale < 2.0**15 and skipped >= 3  # It was worth restoring.
    assert same_bits(everything(model), resumed[frequency])


def lazy():
    """Its layers are created with it, built at its first call."""
    with keras_mp.policy_scope("mixed_float16"):
        hidden = keras.layers.Dense(4, activation="tanh")
        model = Chained([hidden, keras.layers.Dense(1)])
        model.compile("adam", "mse")
    return model


def test_a_model_built_at_its_first_call_gets_its_optimizer_state_back(tmp_path):
    model, again = lazy(), lazy()
    if BACKEND == "tensorflow":  # Or Keras raises: see the next test.
        for each in (model, again):
            each(X[:ROWS])
    fit(model, backups(tmp_path)["epoch"])
    assert fit(again, backups(tmp_path)["epoch"]).epoch == []
    assert counters(again.optimizer)[2] >= 3
    assert same_bits(everything(again), everything(model))


@pytest.mark.skipif(BACKEND != "tensorflow", reason="elsewhere fit builds it before")
def test_backup_and_restore_refuses_a_model_that_is_not_built(tmp_path):
    with pytest.raises(ValueError, match="you model must be built"):
        fit(lazy(), backups(tmp_path)["epoch"])


# Stopped and resumed in a loop of train_on_batch ----------------------------------

# Accumulated over three steps, of which the fifth of all is skipped.
SEQUENCE = [0, 1, 3, 4, OVERFLOWS, 5, 0, 1, 3, 4]
STOPS = {
    "inside an accumulation window": 4,
    "just after a skip": 5,
    "after a skip in the same window": 6,
}


def by_load_model(path, like):
    model = keras.models.load_model(path)
    # The file holds what "auto" came to where it was written.
    model.jit_compile = BACKEND == "jax"
    return model


def by_load_weights(path, like):
    model = like()
    model.optimizer.build(model.trainable_variables)
    model.load_weights(path)
    return model


WAYS = {".keras": by_load_model, ".weights.h5": by_load_weights}


def accumulating():
    optimizer = keras.optimizers.Adam(
        0.01,
        use_ema=True,
        ema_momentum=0.9,
        gradient_accumulation_steps=3,
        global_clipnorm=1.0,
    )
    jit = {"jit_compile": False} if BACKEND == "tensorflow" else {}
    # Low enough that nothing but the third batch overflows, which is to be skipped.
    optimizer = LossScaleOptimizer(optimizer, initial_scale=256.0, retake_steps=0)
    return regression(optimizer, **jit)


def train(model, sequence):
    for index in sequence:
        model.train_on_batch(*batch(index))


@pytest.fixture(scope="module")
def never_stopped():
    model = accumulating()
    train(model, SEQUENCE)
    assert counters(model.optimizer)[2] == 1
    return everything(model)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A folder with the files of one training, saved at each stop."""
    folder, model, done = tmp_path_factory.mktemp("stopped"), accumulating(), 0
    for stop in STOPS.values():
        train(model, SEQUENCE[done:stop])
        assert counters(model.optimizer)[3] == (stop == 5)
        model.save(folder / f"{stop}.keras")
        model.save_weights(folder / f"{stop}.weights.h5")
        done = stop
    return folder


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.sampled
def test_a_stopped_run_resumes_to_the_bit(stopped, never_stopped, stop, way):
    model = WAYS[way](stopped / f"{STOPS[stop]}{way}", accumulating)
    train(model, SEQUENCE[STOPS[stop] :])
    assert same_bits(everything(model), never_stopped)


# From one backend to another ------------------------------------------------------

OTHERS = [
    backend
    for backend in ("jax", "tensorflow", "torch")
    if backend != BACKEND and importlib.util.find_spec(backend)
]


def write(folder):
    folder = pathlib.Path(folder)
    model = accumulating()
    train(model, SEQUENCE[:6])
    model.save(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    np.savez(folder / "everything.npz", *everything(model))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folders = {backend: tmp_path_factory.mktemp(backend) for backend in OTHERS}
    processes = [child(b, f"write({str(f)!r})") for b, f in folders.items()]
    for process in processes:
        ended(process)
    return folders


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.slow("It starts the two other backends.")
def test_what_another_backend_saved_is_the_same_here_and_trains_on(written, other, way):
    model = WAYS[way](written[other] / f"model{way}", accumulating)
    theirs = list(np.load(written[other] / "everything.npz").values())
    assert same_bits(everything(model), theirs)
    assert counters(model.optimizer)[2:4] == [1, 0]
    train(model, SEQUENCE[6:])
    assert int(model.optimizer.iterations) == 3  # Nine steps, three an update.


# Older and foreign files, from tests/data -----------------------------------------


def small():
    with keras_mp.policy_scope("mixed_float16"):
        hidden = keras.layers.Dense(2, activation="tanh")
        layers = [keras.Input((2,)), hidden, keras.layers.Dense(1)]
        model = keras.Sequential(layers)
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize("how", [by_load_model, by_load_weights])
@pytest.mark.parametrize(
    ("name", "skipped"), [("keras-3.15.1", 0), ("keras_mp-09c87dc", 1)]
)
@pytest.mark.usefixtures("installed")
def test_an_older_or_foreign_file_resumes_with_counters_that_start_at_zero(
    name, skipped, how, tmp_path
):
    path = DATA / f"{name}.keras"
    model = how(path, small)
    assert type(model.optimizer) is LossScaleOptimizer
    assert counters(model.optimizer) == [2.0**14, 1, skipped, 0, 0, 2]
    assert model.optimizer.nonfinite_report() == []
    with zipfile.ZipFile(path) as file:
        file.extract("model.weights.h5", tmp_path)
    with h5py.File(tmp_path / "model.weights.h5") as file:
        group = file["optimizer/inner_optimizer/vars"]
        moments = [group[str(i)][()] for i in range(2, 10)]
    assert same_bits(values(model.optimizer.inner_optimizer.variables[2:]), moments)
    assert all(np.any(m) for m in moments)
    model.train_on_batch(np.ones((2, 2), "float32"), np.ones((2, 1), "float32"))
    assert int(model.optimizer.iterations) == 3


# Damaged files --------------------------------------------------------------------

SCALE, COUNT = "3", "2"  # As Keras' wrapper has them.


def put(key, value):
    def damage(group):
        if key in group:
            del group[key]
        group[key] = value

    return damage


def drop(key):
    return lambda group: group.__delitem__(key)


DAMAGES = {
    "an entry is missing": (drop("7"), "without 7"),
    "the first entry is missing": (drop("0"), "without 0"),
    "the last entry is missing": (drop("13"), "Received: 17 entries"),
    "a counter is missing": (drop("skipped_steps"), "Received: 17 entries"),
    "an entry too many": (put("14", 1.0), "Received: 19 entries"),
    "an entry of nobody's": (put("other", 1), "Received: 19 entries"),
    "another shape": (put("6", np.zeros((2, 3))), r"of shape \(2, 3\)"),
    "a matrix of scales": (put(SCALE, np.ones((2, 2))), r"shape \(\)"),
    "words": (put("8", ["a", "b"]), "object of shape"),
    "a nan for a scale": (put(SCALE, np.nan), "Received: nan"),
    "an infinite scale": (put(SCALE, np.inf), "Received: inf"),
    "a scale of zero": (put(SCALE, 0.0), "Received: 0.0"),
    "a negative scale": (put(SCALE, -2.0), "Received: -2.0"),
    "negative finite steps": (put(COUNT, -1), "counts of at least 0"),
    "negative skipped steps": (put("skipped_steps", -1), "counts of at least 0"),
    "negative iterations": (put("4", -1), "counts of at least 0"),
    "negative counts of variables": (
        put("nonfinite_counts", np.full((5, 4), -1)), "counts of at least 0",
    ),
}  # fmt: skip


def filled(model, start):
    """All variables of the optimizer filled, none like those of another `start`."""
    model.optimizer.build(model.trainable_variables)
    for index, variable in enumerate(model.optimizer.variables):
        variable.assign(np.full(variable.shape, start + index))
    return model


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("intact")
    model = filled(small(), start=100)
    model.save(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    return folder


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_an_error_and_changes_nothing(intact, tmp_path, name):
    damage, message = DAMAGES[name]
    path = shutil.copy(intact / "model.weights.h5", tmp_path)
    with h5py.File(path, "r+") as file:
        damage(file["optimizer/vars"])
    model = filled(small(), start=1000)
    before = values(model.optimizer.variables)
    with pytest.raises(ValueError, match=message) as error:
        model.load_weights(path)
    assert "optimizer 'loss_scale_optimizer" in str(error.value)
    assert "Load another copy" in str(error.value)
    assert same_bits(values(model.optimizer.variables), before)
    model.load_weights(intact / "model.weights.h5")  # A good one is welcome after it.
    saved = values(filled(small(), start=100).optimizer.variables)
    assert same_bits(values(model.optimizer.variables), saved)


def test_without_slots_it_trains_on_with_more_variables(tmp_path):
    """As in Keras. KerasHub's Whisper trains its positions when it is opened again."""
    frozen = regression()
    frozen.layers[0].trainable = False
    frozen.compile(LossScaleOptimizer("sgd", retake_steps=0), "mse")
    frozen.fit(X, Y, batch_size=ROWS, verbose=0)
    frozen.save_weights(tmp_path / "model.weights.h5")
    sgd = LossScaleOptimizer("sgd", retake_steps=0)
    model = filled(regression(sgd), start=1000)
    with pytest.warns(UserWarning, match="6 variables to train, .* optimizer has 4"):
        model.load_weights(tmp_path / "model.weights.h5")
    assert counters(model.optimizer) == counters(frozen.optimizer)
    assert not values([model.optimizer._loss_scaling.nonfinite_counts])[0].any()
    model.fit(X, Y, batch_size=ROWS, verbose=0)
    assert int(model.optimizer.iterations) == 2 * int(frozen.optimizer.iterations)


def test_load_model_says_what_is_damaged_and_the_remedies_work(intact, tmp_path):
    path = tmp_path / "model.keras"
    with zipfile.ZipFile(intact / "model.keras") as whole:
        whole.extract("model.weights.h5", tmp_path)
        with h5py.File(tmp_path / "model.weights.h5", "r+") as file:
            put(SCALE, np.nan)(file["optimizer/vars"])
        with zipfile.ZipFile(path, "w") as damaged:
            damaged.writestr("metadata.json", whole.read("metadata.json"))
            damaged.writestr("config.json", whole.read("config.json"))
            damaged.write(tmp_path / "model.weights.h5", "model.weights.h5")
    with pytest.raises(ValueError, match="positive and finite. Received: nan"):
        keras.models.load_model(path)
    again = keras.models.load_model(path, compile=False)
    model = small()
    weights = tmp_path / "model.weights.h5"
    model.load_weights(weights, objects_to_skip=[model.optimizer])
    assert same_bits(values(model.weights), values(again.weights))


@pytest.mark.parametrize("share", [0.5, 0.9, 0.999])
def test_a_truncated_file_is_an_error_and_changes_nothing(intact, tmp_path, share):
    path = tmp_path / "model.weights.h5"
    content = (intact / "model.weights.h5").read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    model = filled(small(), start=1000)
    before = values(model.optimizer.variables)
    # OSError, so that BackupAndRestore(double_checkpoint=True) takes its older copy.
    with pytest.raises(OSError, match="truncated"):
        model.load_weights(path)
    assert same_bits(values(model.optimizer.variables), before)


def test_after_a_refused_checkpoint_a_saved_file_is_whole(intact, tmp_path):
    model = filled(small(), start=1000)
    with pytest.raises(ValueError, match="without a gap"):
        model.optimizer.load_own_variables({"0": 1, "2": 1})
    model.save_weights(tmp_path / "model.weights.h5")
    with h5py.File(tmp_path / "model.weights.h5") as file:
        assert len(file["optimizer/inner_optimizer/vars"]) == 10


# Another optimizer's, and Keras' own scales ---------------------------------------


def built(optimizer, variables=1):
    optimizer.build([keras.Variable(np.ones(3, "float32")) for _ in range(variables)])
    return optimizer


def stored(optimizer):
    store = {}
    optimizer.save_own_variables(store)
    return store


def stored_by_keras(scale):
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    return {**stored(built(theirs)), SCALE: np.float32(scale)}


def test_a_checkpoint_of_another_optimizer_is_skipped_with_the_warning_of_keras():
    store = stored(built(LossScaleOptimizer("adam")))
    optimizer = built(LossScaleOptimizer("sgd", initial_scale=8.0))
    before = values(optimizer.variables)
    with pytest.warns(UserWarning, match="has 6 variables whereas .* has 8 variables"):
        optimizer.load_own_variables(store)
    assert same_bits(values(optimizer.variables), before)


def test_as_many_entries_as_we_have_variables_do_not_make_a_checkpoint_ours():
    # Keras' method would take these by number: ten entries for ten variables.
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(momentum=0.5))
    store = stored(built(theirs, variables=4))
    optimizer = built(LossScaleOptimizer("sgd", initial_scale=8.0), variables=4)
    assert len(store) == len(optimizer.variables)
    before = values(optimizer.variables)
    with pytest.warns(UserWarning, match="has 6 variables whereas .* 10 variables"):
        optimizer.load_own_variables(store)
    assert same_bits(values(optimizer.variables), before)


def test_a_file_from_before_the_first_step_says_so_to_a_trained_optimizer():
    store = stored(LossScaleOptimizer("sgd"))
    optimizer = built(LossScaleOptimizer("sgd"))
    optimizer.load_own_variables(store)
    optimizer.iterations.assign(5)
    with pytest.warns(UserWarning, match="has 6 variables whereas .* 0 variables"):
        optimizer.load_own_variables(store)
    assert int(optimizer.iterations) == 5


@pytest.mark.parametrize(
    ("scale", "resumes_at"),
    [(0.0, 2.0), (1e-30, 2.0), (8.0, 8.0), (2.0**40, 64.0), (np.inf, 64.0)],
)
def test_a_scale_of_keras_beyond_the_bounds_resumes_at_the_nearest(scale, resumes_at):
    optimizer = built(LossScaleOptimizer("sgd", 16.0, min_scale=2.0, max_scale=64.0))
    optimizer.load_own_variables(stored_by_keras(scale))
    assert float(optimizer.loss_scale) == resumes_at


@pytest.mark.parametrize("scale", [np.nan, -1.0])
def test_a_scale_that_not_even_keras_writes_is_refused(scale):
    optimizer = built(LossScaleOptimizer("sgd"))
    with pytest.raises(ValueError, match="positive and finite"):
        optimizer.load_own_variables(stored_by_keras(scale))
    assert float(optimizer.loss_scale) == 2.0**15


def test_moments_that_are_not_finite_are_left_as_they_are():
    store = stored(built(LossScaleOptimizer("adam")))
    store["6"] = np.array([np.inf, np.nan, 1], "float32")
    optimizer = built(LossScaleOptimizer("adam"))
    optimizer.load_own_variables(store)
    assert same_bits(values(optimizer.inner_optimizer.variables[2:3]), [store["6"]])


def test_counts_at_the_end_of_their_range_go_on_and_stay_positive():
    optimizer, variables = LossScaleOptimizer("sgd"), [keras.Variable(np.ones(2))]
    optimizer.build(variables)
    saved = {}
    optimizer.save_own_variables(saved)
    for key, value in saved.items():
        if value.dtype.kind == "i" and key in ("0", "skipped_steps"):
            saved[key] = np.full_like(value, 2**31 - 1)
    optimizer.load_own_variables(saved)
    optimizer.scale_loss(1.0)
    optimizer.apply([np.inf * keras.ops.ones(2)], variables)
    assert int(optimizer.skipped_steps) == 2**30 + 1
