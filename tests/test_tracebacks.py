"""An error of the user's shows his own lines, as under Keras alone."""

import pathlib
import traceback

import keras
import numpy as np
import pytest
from keras import layers

import keras_mp

PACKAGE = pathlib.Path(keras_mp.__file__).parent
X, Y = np.ones((4, 3), "float32"), np.ones((4, 2), "float32")


class Mine(RuntimeError):
    """What Keras makes of it where it builds a model in `fit`."""


class Fails(layers.Layer):
    fails = False

    def call(self, x):
        if self.fails:
            raise Mine
        return x


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense, self.last = layers.Dense(2), Fails()

    def call(self, x):
        return self.last(self.dense(x))


class OwnStep(Subclassed):
    def train_step(self, *args, **kwargs):
        raise Mine


class Loss(keras.losses.Loss):
    def call(self, y_true, y_pred):
        raise Mine


class Raises(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise Mine


def sequential():
    return keras.Sequential([layers.Dense(2), Fails()])


def failing(build, loss="mse"):
    model = build()
    model(X)
    model.compile("sgd", loss)
    model.layers[-1].fails = loss == "mse" and build is not OwnStep
    return model


def fitted(build, loss="mse"):
    return lambda: failing(build, loss).fit(X, Y, verbose=0)


def interrupted_by_a_callback():
    model = sequential()
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0, callbacks=[Raises()])


PROGRAMS = {
    "a call of a graph": lambda: failing(sequential)(X),
    "a call": lambda: failing(Subclassed)(X),
    "fit of a graph": fitted(sequential),
    "fit": fitted(Subclassed),
    "a train step": fitted(OwnStep),
    "a loss": fitted(sequential, Loss()),
    "a callback": interrupted_by_a_callback,
    "predict": lambda: failing(Subclassed).predict(X, verbose=0),
    "evaluate": lambda: failing(sequential).evaluate(X, Y, verbose=0),
}


def frames_of(program):
    """The files of an error's traceback."""
    with keras_mp.policy_scope("mixed_float16"), pytest.raises(RuntimeError) as raised:
        program()
    shown = traceback.extract_tb(raised.value.__traceback__)
    return [pathlib.Path(frame.filename) for frame in shown]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_traceback_has_none_of_our_frames(program):
    files = frames_of(PROGRAMS[program])
    assert [file for file in files if PACKAGE in file.parents] == []
    assert pathlib.Path(__file__) in files


def test_it_has_all_of_them_on_request():
    keras.config.disable_traceback_filtering()
    try:
        files = frames_of(PROGRAMS["fit"])
    finally:
        keras.config.enable_traceback_filtering()
    assert [file for file in files if PACKAGE in file.parents]


def test_so_it_is_keras_own_without_us():
    keras_mp.uninstall()
    try:
        files = frames_of(PROGRAMS["fit"])
    finally:
        keras_mp.install()
    assert pathlib.Path(__file__) in files


@keras.saving.register_keras_serializable("test_tracebacks")
class OwnCompile(keras.Sequential):
    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs)


def test_a_warning_of_keras_about_a_compile_names_the_users_line(tmp_path):
    with keras_mp.policy_scope("mixed_float16"):
        model = OwnCompile([keras.Input((3,)), layers.Dense(2)])
        model.compile("sgd", "mse")
    model.save(tmp_path / "model.keras")
    with pytest.warns(UserWarning, match="`compile\\(\\)` method is custom") as told:
        keras.models.load_model(tmp_path / "model.keras")
    assert {warning.filename for warning in told} == {__file__}
