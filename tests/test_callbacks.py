"""What LossScaleMonitor tells, where, and what it costs: no wait, no other numbers."""

import copy
import csv
import pickle
import re
import threading

import keras
import numpy as np
import pytest
from backends import BACKEND
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from keras import layers

import keras_mp
from keras_mp.callbacks import LossScaleMonitor
from keras_mp.loss_scaling.underflow import subnormal_share

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(32, 4)).astype("float32")
Y = RANDOM.normal(size=(32, 2)).astype("float32")
SCALE = 2.0**8  # At which nothing overflows.
TOLD = ("loss_scale", "skipped_steps")
NOT_FINITE = pytest.mark.filterwarnings("ignore")  # The loss is not, at any scale.


def model_under(policy="mixed_float16", scale=SCALE, **compile):
    keras.utils.set_random_seed(0)
    with keras_mp.policy_scope(policy):
        model = keras.Sequential(
            [keras.Input((4,)), layers.Dense(8), layers.Dense(2, name="head")]
        )
    model.compile("sgd", "mse", **compile)
    if policy == "mixed_float16":
        model.optimizer.dynamic_scale.assign(scale)
    return model


def fit(model, *callbacks, x=X, y=Y, epochs=1, **options):
    options = {"batch_size": 8, "verbose": 0, "shuffle": False} | options
    return model.fit(x, y, epochs=epochs, callbacks=list(callbacks), **options)


class Batches(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append(dict(logs))


@pytest.mark.parametrize("first", [True, False])
def test_every_logger_reads_it_in_whatever_order_they_stand(first, tmp_path, capsys):
    monitor, batches = LossScaleMonitor(), Batches()
    file = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    order = [monitor, batches, file] if first else [file, batches, monitor]
    history = fit(model_under(), *order, epochs=2, verbose=2).history
    assert history["loss_scale"] == [SCALE] * 2
    assert history["skipped_steps"] == [0, 0]
    assert len(batches.logs) == 8
    assert all(logs["loss_scale"] == SCALE for logs in batches.logs)
    with open(tmp_path / "log.csv") as log:
        (row, _) = csv.DictReader(log)
    assert float(row["loss_scale"]) == SCALE
    assert "loss_scale: 256" in capsys.readouterr().out


@NOT_FINITE
@pytest.mark.parametrize(
    "compile", [{}, {"run_eagerly": True}, {"steps_per_execution": 2}]
)
def test_skips_are_reported_at_the_step_in_which_they_happen(compile):
    x = X.copy()
    x[9] = 2.0**120  # In the second batch; activations in float16 are infinite.
    if BACKEND == "torch" and "steps_per_execution" in compile:
        pytest.skip("Keras has no steps_per_execution on torch")
    batches = Batches()
    model = model_under(**compile)
    history = fit(model, LossScaleMonitor(), batches, x=x)
    counts = [int(logs["skipped_steps"]) for logs in batches.logs]
    steps = compile.get("steps_per_execution", 1)
    assert counts == [0, 1, 1, 1][steps - 1 :: steps]
    assert history.history["skipped_steps"] == [1]


def test_it_changes_no_other_number_and_validation_has_none_of_its_own():
    monitored, plain = model_under(), model_under()
    a = fit(monitored, LossScaleMonitor(), epochs=3, validation_data=(X, Y)).history
    b = fit(plain, epochs=3, validation_data=(X, Y)).history
    assert set(b) == {"loss", "val_loss"} and b.items() <= a.items()
    assert set(a) - set(b) == set(TOLD)


UNDERFLOWING = [(X * 1e-5, 1.0, 0.75, np.float32(0.8)), (X, SCALE, 0.0, 0.05)]


@pytest.mark.parametrize(("x", "scale", "lowest", "highest"), UNDERFLOWING)
@pytest.mark.parametrize("compile", [{}, {"run_eagerly": True}])
def test_the_share_of_underflowing_gradients_is_reported_on_request(
    x, scale, lowest, highest, compile
):
    # Of 40 in the float16 layer 32 are by its kernel, and tiny if the inputs are.
    monitor, batches = LossScaleMonitor(underflow=True), Batches()
    history = fit(model_under(scale=scale, **compile), monitor, batches, x=x).history
    assert set(history) == {"loss", "underflow", *TOLD}
    shares = [float(logs["underflow"]) for logs in batches.logs]
    assert len(shares) == 4
    assert lowest <= min(shares) <= max(shares) <= highest


@given(arrays("float16", 20, elements=st.floats(width=16, allow_nan=False)))
def test_the_share_is_that_of_numpy(values):
    size = np.abs(values.astype("float64"))
    present = size[size > 0]
    share = np.mean(present < np.finfo("float16").tiny) if present.size else 0.0
    grads = [keras.ops.convert_to_tensor(part) for part in np.split(values, [3, 20])]
    assert float(subnormal_share(grads)) == pytest.approx(share)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_an_optimizer_that_does_not_scale_adds_nothing(policy):
    history = fit(model_under(policy), LossScaleMonitor()).history
    assert set(history) == {"loss"}


def test_a_model_that_has_trained_before_reports_what_is_asked_from_then_on():
    model = model_under()
    assert set(fit(model).history) == {"loss"}
    monitor = LossScaleMonitor()
    assert set(fit(model, monitor).history) == {"loss", *TOLD}
    function = model.train_function
    fit(model, monitor)
    assert model.train_function is function
    history = fit(model, LossScaleMonitor(underflow=True)).history
    assert set(history) == {"loss", "underflow", *TOLD}


def test_a_scale_that_keeps_falling_is_reported_once():
    # At this scale every step overflows: it falls from 2^60 at each of them.
    model = model_under(scale=2.0**60)
    model.optimizer._loss_scaling.retakes = False
    monitor = LossScaleMonitor()
    with pytest.warns(UserWarning, match="has fallen 12 times") as caught:
        fit(model, monitor, epochs=5)
    assert len([w for w in caught if "has fallen" in str(w.message)]) == 1


@NOT_FINITE
def test_the_first_skip_after_a_quiet_time_names_the_variables(capsys):
    x = np.tile(X, (4, 1))
    x[8 * 12] = 2.0**120
    model = model_under()
    monitor = LossScaleMonitor(quiet_steps=10)
    fit(model, monitor, x=x, y=np.tile(Y, (4, 1)))
    out = capsys.readouterr().out
    assert out.count("keras_mp: step 13 skipped (nan in ") == 1
    assert "loss scale stays" in out and "Normal" not in out
    assert "head/kernel" in out


@pytest.mark.parametrize(
    ("target", "retakes", "said"),
    [
        # No scale suits this one, which is skipped at the first or after all tries.
        (2.0**60, False, r"step 13 skipped \(inf in .*; loss scale 256 -> 128\."),
        (2.0**60, True, r"step 13 overflowed \(inf in .*; loss scale 256 -> 128\."),
        # A third or fourth try.
        (2.0**14, True, r"step 1[56] overflowed \(inf .*; loss scale 256 -> (32|16)\."),
    ],
)
def test_the_first_overflow_after_a_quiet_time_is_called_normal(
    capsys, target, retakes, said
):
    y = np.tile(Y, (4, 1))
    y[8 * 12] = target  # Its loss is finite, its scaled gradients are not.
    model = model_under()
    model.optimizer._loss_scaling.retakes = retakes
    model.optimizer.learning_rate = 0.0  # What follows does not overflow.
    monitor = LossScaleMonitor(quiet_steps=10)
    fit(model, monitor, x=np.tile(X, (4, 1)), y=y)
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(f"keras_mp: {said} Normal now and then", out), out


def test_a_skip_that_is_no_surprise_is_not_reported(capsys):
    model = model_under(scale=2.0**24)
    fit(model, LossScaleMonitor(quiet_steps=50), epochs=4)
    assert "skipped (" not in capsys.readouterr().out


@pytest.mark.skipif(
    not keras.src.backend.IS_THREAD_SAFE, reason="there they run between the steps"
)
def test_keras_calls_it_beside_the_training():
    callbacks = keras.callbacks.CallbackList([LossScaleMonitor()])
    assert callbacks._async_train


@pytest.mark.skipif(BACKEND != "jax", reason="there Keras waits at every step")
def test_no_step_of_the_training_waits_for_what_it_reports():
    readers = []

    class Number:
        def __init__(self, value):
            self.value = value

        def __float__(self):
            readers.append(threading.current_thread())
            return float(self.value)

    model = model_under()
    monitor = LossScaleMonitor(underflow=True)
    fit(model, monitor)
    function = model.train_function

    def noted(*args):
        logs, state = function(*args)
        # What stands still until the device has it.
        return {name: Number(value) for name, value in logs.items()}, state

    model.train_function = noted
    here = []
    for batch_size in (8, 2):
        readers.clear()
        fit(model, monitor, batch_size=batch_size)
        here.append(readers.count(threading.current_thread()))
        # Elsewhere each of 4 numbers is read at each step.
        assert len(readers) - here[-1] >= 4 * 32 / batch_size
    assert here[0] == here[1]  # Here at the end of the epoch alone.


@pytest.mark.parametrize("steps", [0, -1, 1.5, "100", None, True])
def test_quiet_steps_that_are_no_number_are_refused(steps):
    with pytest.raises((TypeError, ValueError), match="quiet_steps"):
        LossScaleMonitor(quiet_steps=steps)


def test_an_underflow_that_is_no_bool_is_refused():
    with pytest.raises(TypeError, match="`underflow` must be a bool. Received: under"):
        LossScaleMonitor(underflow=1)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_monitor_can_be_copied_and_pickled(again):
    monitor = again(LossScaleMonitor(quiet_steps=7))
    assert monitor.quiet_steps == 7
    with keras_mp.policy_scope("mixed_float16"):
        model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
        hidden = keras.Sequential([keras.Input((2,)), layers.Dense(2), model])
    hidden.compile("sgd", "mse")
    x = np.ones((4, 2), "float32")
    history = hidden.fit(x, x[:, :1], verbose=0, callbacks=[monitor])
    assert len(history.history["loss_scale"]) == 1
