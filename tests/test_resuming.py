"""A run goes on under another policy: its file was written with another wrapper."""

import shutil

import h5py
import keras
import numpy as np
import pytest
from backends import values, without_us

import keras_mp

layers = keras.layers

POLICIES = ["float32", "mixed_float16", "mixed_bfloat16", "bfloat16"]
SCALE = 2.0**7
SEED = 17
RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 3)).astype("float32")
Y = (X @ np.array([[0.5], [-0.5], [0.25]], "float32")).astype("float32")


def model_under(policy, optimizer="adam", built=True):
    """Compiled, with the wrapper that the policy needs."""
    keras.utils.set_random_seed(1)
    with keras_mp.policy_scope(policy):
        hidden = layers.Dense(4, activation="tanh")
        model = keras.Sequential([keras.Input((3,)), hidden, layers.Dense(1)])
    if policy == "bfloat16":
        optimizer = keras_mp.StochasticRoundingOptimizer(optimizer, seed=SEED)
    model.compile(optimizer, "mse")
    if built:
        model.optimizer.build(model.trainable_variables)
    return model


def scales(model):
    return isinstance(model.optimizer, keras_mp.LossScaleOptimizer)


def plain(optimizer):
    """The optimizer without its wrappers."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return optimizer if inner is None else plain(inner)


def assert_resumed(model, written, iterations=3):
    """Iterations and slots to the bit, and the scale if both have one."""
    assert int(model.optimizer.iterations) == iterations
    ours, theirs = plain(model.optimizer).variables, plain(written.optimizer).variables
    for a, b in zip(values(ours), values(theirs), strict=True):
        assert np.any(b)
        # bfloat16's slots are rounded as any number that is assigned to them.
        assert a.tobytes() == b.astype(a.dtype).tobytes()
    if scales(model):
        expected = SCALE if scales(written) else 2.0**15
        assert float(model.optimizer.loss_scale) == expected
    if model.optimizer.name.startswith("stochastic"):
        assert values(model.optimizer.variables)[0] == SEED


class Stops(keras.callbacks.Callback):
    """Ends a training as a crash does, in its second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            raise InterruptedError


class Restored(keras.callbacks.Callback):
    """Looks at the optimizer where `fit` starts, after the callbacks before it."""

    def __init__(self, written):
        super().__init__()
        self.written = written

    def on_train_begin(self, logs=None):
        assert_resumed(self.model, self.written)


def fit(model, *callbacks):
    arguments = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    model.fit(X, Y, callbacks=[*callbacks], **arguments)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """For each policy a model that stopped after an epoch, and the folder of its files.

    The folder has `model.weights.h5` and the folder `backup`.
    """
    found = {}
    for policy in POLICIES:
        folder = tmp_path_factory.mktemp(policy)
        model = model_under(policy)
        if scales(model):
            model.optimizer.dynamic_scale.assign(SCALE)
        path = folder / "model.weights.h5"
        checkpoint = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
        backup = keras.callbacks.BackupAndRestore(folder / "backup")
        with pytest.raises(InterruptedError):
            fit(model, checkpoint, backup, Stops())
        found[policy] = model, folder
    return found


reads = pytest.mark.parametrize("reads", POLICIES)
writes = pytest.mark.parametrize("writes", POLICIES)


@reads
@writes
@pytest.mark.sampled
@pytest.mark.usefixtures("installed")
def test_a_model_checkpoint_resumes_under_any_policy(written, writes, reads):
    theirs, folder = written[writes]
    model = model_under(reads)
    model.load_weights(folder / "model.weights.h5")
    assert_resumed(model, theirs)


@reads
@writes
@pytest.mark.sampled
@pytest.mark.usefixtures("installed")
def test_backup_and_restore_resumes_under_any_policy(written, writes, reads, tmp_path):
    theirs, folder = written[writes]
    shutil.copytree(folder / "backup", tmp_path / "backup")
    model = model_under(reads, built=False)
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    fit(model, backup, Restored(theirs))
    assert int(model.optimizer.iterations) == 6


@reads
@writes
def test_an_optimizer_that_is_not_built_says_so_as_in_keras(written, writes, reads):
    model = model_under(reads, built=False)
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        model.load_weights(written[writes][1] / "model.weights.h5")
    assert int(model.optimizer.iterations) == 0


@reads
@writes
def test_a_file_from_before_the_first_step_is_read_in_silence(writes, reads, tmp_path):
    model_under(writes, built=False).save_weights(tmp_path / "new.weights.h5")
    model_under(reads, built=False).load_weights(tmp_path / "new.weights.h5")


OPTIMIZERS = {
    "sgd": lambda: "sgd",
    "momentum": lambda: keras.optimizers.SGD(momentum=0.5),
    "nadam": lambda: "nadam",
    "schedule": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    ),
    "ema": lambda: keras.optimizers.Adam(use_ema=True),
    "accumulating": lambda: keras.optimizers.Adam(gradient_accumulation_steps=2),
}


def filled(model, start=1.0):
    """Other numbers in every variable of the optimizer, as after a training."""
    for index, variable in enumerate(plain(model.optimizer).variables):
        variable.assign(np.full(variable.shape, start + index))
    return model


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("reads", ["float32", "mixed_float16", "bfloat16"])
@pytest.mark.parametrize("writes", ["float32", "mixed_float16", "bfloat16"])
@pytest.mark.sampled
def test_every_kind_of_optimizer_resumes(writes, reads, name, tmp_path):
    theirs = filled(model_under(writes, OPTIMIZERS[name]()))
    theirs.save_weights(tmp_path / "model.weights.h5")
    model = model_under(reads, OPTIMIZERS[name]())
    model.load_weights(tmp_path / "model.weights.h5")
    found = zip(
        values(plain(model.optimizer).variables),
        values(plain(theirs.optimizer).variables),
        strict=True,
    )
    assert all(np.array_equal(a, b) for a, b in found)


@pytest.mark.parametrize("reads", ["float32", "mixed_bfloat16", "bfloat16"])
@pytest.mark.usefixtures("installed")
def test_what_keras_itself_scaled_resumes_without_a_scale(reads, tmp_path):
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    theirs = filled(model_under("float32", scaler))
    theirs.save_weights(tmp_path / "model.weights.h5")
    model = model_under(reads)
    model.load_weights(tmp_path / "model.weights.h5")
    assert_resumed(model, theirs, iterations=1)


@pytest.mark.usefixtures("installed")
def test_keras_own_wrapper_resumes_what_ours_saved(written):
    theirs, folder = written["mixed_float16"]
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    model = model_under("float32", scaler)
    model.load_weights(folder / "model.weights.h5")
    assert_resumed(model, theirs)
    assert float(model.optimizer.dynamic_scale) == SCALE


ANOTHER = (
    "Skipping variable loading for optimizer .* has {} variables whereas .* has {}"
)


@pytest.mark.parametrize(
    ("writer", "reader", "message"),
    [
        ("sgd", "adam", ANOTHER.format(10, 6)),
        ("adam", "sgd", ANOTHER.format(2, 14)),
        # Ten numbers, as many as Adam has.
        ("momentum", "adam", ANOTHER.format(10, 10)),
    ],
)
def test_the_file_of_another_optimizer_is_skipped(writer, reader, message, tmp_path):
    optimizers = {**OPTIMIZERS, "adam": lambda: "adam"}
    theirs = filled(model_under("mixed_float16", optimizers[writer]()))
    theirs.save_weights(tmp_path / "model.weights.h5")
    model = model_under("float32", optimizers[reader]())
    before = values(model.optimizer.variables)
    with pytest.warns(UserWarning, match=message) as caught:
        model.load_weights(tmp_path / "model.weights.h5")
    assert [w.filename for w in caught] == [__file__]
    for a, b in zip(values(model.optimizer.variables), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_optimizer_with_one_variable_more_is_no_rounding_wrapper(tmp_path):
    """Nadam has Adam's variables, and one scalar before them."""
    theirs = filled(model_under("float32", "nadam"))
    theirs.save_weights(tmp_path / "model.weights.h5")
    model = model_under("float32", "adam")
    with pytest.warns(UserWarning, match=ANOTHER.format(10, 11)):
        model.load_weights(tmp_path / "model.weights.h5")
    assert int(model.optimizer.iterations) == 0


@pytest.mark.usefixtures("installed")
def test_a_file_without_one_of_its_entries_is_skipped(written, tmp_path):
    path = tmp_path / "damaged.weights.h5"
    shutil.copy(written["mixed_float16"][1] / "model.weights.h5", path)
    with h5py.File(path, "a") as file:
        del file["optimizer/vars/7"]
    model = model_under("float32")
    with pytest.warns(UserWarning, match=ANOTHER.format(10, 13)):
        model.load_weights(path)
    assert int(model.optimizer.iterations) == 0


def test_keras_alone_reads_the_weights_of_any_of_them(written):
    for theirs, folder in written.values():
        model = model_under("float32", built=False)

        def load(model=model, path=folder / "model.weights.h5"):
            with pytest.warns(UserWarning, match="Skipping variable loading"):
                model.load_weights(path)

        without_us(load)
        for a, b in zip(values(model.weights), values(theirs.weights), strict=True):
            np.testing.assert_array_equal(a, b.astype("float32"))
