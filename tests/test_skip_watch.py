"""What the user is told of skipped steps that no loss scale can mend, and when."""

import re
import warnings

import keras
import numpy as np
import pytest
from backends import BACKEND, COMPILED, stateful_step, tensors, values

import keras_mp

NAN = np.float32(np.nan)
BROKEN = [np.array([NAN, 1.0], "float32"), np.float32(1.0)]
FINITE = [np.array([1.0, 1.0], "float32"), np.float32(1.0)]


def make(**kwargs):
    variables = [
        keras.Variable(np.ones(2, "float32"), name="kernel"),
        keras.Variable(np.float32(1), name="bias"),
    ]
    kwargs = {"initial_scale": 4.0, "min_scale": 4.0, **kwargs}
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(0.5), **kwargs)
    optimizer.scale_loss(1.0)
    return optimizer, variables


def test_a_broken_step_is_told_once_with_the_variables_concerned():
    optimizer, variables = make()
    step = stateful_step(optimizer, variables, compiled=False)
    step(FINITE)
    with pytest.warns(UserWarning) as told:
        step(BROKEN)
        step(FINITE)
        step(BROKEN)
    (message,) = (str(w.message) for w in told if w.category is UserWarning)
    assert "at step 2 " in message and "loss scale 4;" in message
    assert "finite last: kernel)" in message and "bias" not in message
    assert "Lower the learning rate" in message


def test_an_overflow_that_a_lower_scale_may_mend_is_not_told():
    optimizer, variables = make(min_scale=1.0)
    stateful_step(optimizer, variables, compiled=False)(BROKEN)
    assert float(optimizer.loss_scale) == 2.0


def test_a_loss_that_is_not_finite_is_told():
    optimizer, variables = make(min_scale=1.0)
    step = stateful_step(optimizer, variables, compiled=False)
    with pytest.warns(UserWarning) as told:
        step(BROKEN, np.float32(np.inf))
    (message,) = (str(w.message) for w in told if w.category is UserWarning)
    assert message.startswith("1 of 1 steps were skipped because the loss is not fin")
    assert message.endswith("print(keras_mp.diagnose(model, x, y))")
    # All variables are infected, and neither clipping nor another rate helps.
    assert "kernel" not in message and "learning rate" not in message
    assert float(optimizer.loss_scale) == 4.0


def test_a_scale_that_does_not_move_and_is_too_high_is_told():
    optimizer, variables = make(dynamic=False, min_scale=1.0)
    step = stateful_step(optimizer, variables, compiled=False)
    with pytest.warns(UserWarning, match="at a scale that goes no lower"):
        step(BROKEN)


def test_after_loading_only_what_is_new_is_told_and_counted():
    optimizer, variables = make(max_consecutive_skips=3)
    step = stateful_step(optimizer, variables, compiled=False)
    with pytest.warns(UserWarning, match="^1 of 1"):
        step(BROKEN)
    step(FINITE)
    saved = {}
    optimizer.save_own_variables(saved)
    again, variables = make(max_consecutive_skips=3)
    again.build(variables)
    again.load_own_variables(saved)
    again.raise_if_diverged()  # Nothing is said of what was told before it was saved.
    step = stateful_step(again, variables, compiled=False)
    with pytest.warns(UserWarning, match="^2 of 2"):
        step(BROKEN)
    step(BROKEN)
    with pytest.raises(keras_mp.TrainingDivergedError):
        step(BROKEN)
    again.load_own_variables(saved)  # And back: three more are three again.
    step(BROKEN)
    step(BROKEN)
    with pytest.raises(keras_mp.TrainingDivergedError):
        step(BROKEN)


def test_a_long_list_of_variables_is_cut():
    optimizer, _ = make()
    variables = [keras.Variable(np.float32(1), name=f"v{i}") for i in range(9)]
    with pytest.warns(UserWarning, match=re.escape("last: v0, v1, v2 and 6 more)")):
        optimizer.apply(tensors([NAN] * 9), variables)


def test_a_fit_within_an_except_block_is_told_as_well():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras_mp.LossScaleOptimizer("sgd", max_consecutive_skips=2)
    model.compile(optimizer, "mse")
    x, y = np.full((2, 2), np.nan), np.zeros((2, 1))  # Only the end of `fit` looks.
    try:
        raise OSError("no network")
    except OSError:
        with pytest.raises(keras_mp.TrainingDivergedError):
            model.fit(x, y, batch_size=1, verbose=0)


@pytest.mark.parametrize("compiled", [c for c in COMPILED if c])
def test_a_compiled_loop_is_told_when_it_asks(compiled):
    optimizer, variables = make(max_consecutive_skips=2)
    step = stateful_step(optimizer, variables, compiled)
    step(BROKEN)
    with pytest.warns(UserWarning, match="finite last: kernel"):
        optimizer.raise_if_diverged()
    optimizer.raise_if_diverged()
    step(BROKEN)
    state = [v.value for v in optimizer.variables]
    with pytest.raises(keras_mp.TrainingDivergedError) as error:
        optimizer.raise_if_diverged(state)
    for part in ("2 steps in a row", "at step 2 ", "loss scale 4;", "kernel", "clip"):
        assert part in str(error.value)


def test_fit_looks_after_ten_steps_once_in_a_hundred_and_at_the_end(monkeypatch):
    looks = []
    original = keras_mp.LossScaleOptimizer.raise_if_diverged

    def counting(self, *args):
        looks.append(1)
        original(self, *args)

    monkeypatch.setattr(keras_mp.LossScaleOptimizer, "raise_if_diverged", counting)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras_mp.LossScaleOptimizer("sgd", initial_scale=8.0), "mse")
    model.fit(np.ones((250, 1)), np.ones((250, 1)), batch_size=1, verbose=0)
    assert len(looks) == 4  # Before steps 11, 111 and 211, and at the end.


def test_fit_tells_of_broken_steps_before_it_ends():
    class LastBatch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.batch = batch

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras_mp.LossScaleOptimizer("sgd"), "mse")
    x, last = np.ones((250, 1)), LastBatch()
    x[3] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(UserWarning, match="1 of 10 steps"):
            model.fit(x, x, batch_size=1, shuffle=False, verbose=0, callbacks=[last])
    assert last.batch == 9


def test_an_activation_that_overflows_is_told_within_twenty_steps():
    class Square(keras.layers.Layer):
        def call(self, x):
            return x * x

    class LastBatch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.batch = batch

    with keras_mp.policy_scope("mixed_float16"):
        dense = keras.layers.Dense(4, kernel_initializer="ones", name="dense")
        square = Square(name="square")
        stack = [keras.Input((1,)), dense, square, keras.layers.Dense(1)]
        model = keras.Sequential(stack, name="model")
    model.compile("sgd", "mse")
    x, last = np.full((250, 1), 7000.0), LastBatch()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(UserWarning) as told:
            model.fit(x, x, batch_size=1, verbose=0, callbacks=[last])
    assert last.batch < 20
    message = str(told.value)
    assert message.startswith("10 of 10 steps were skipped because the loss is not")
    assert "An activation overflows float16" in message
    line = message.rpartition(": ")[2]
    assert line == "print(keras_mp.diagnose(model, x, y))"
    report = eval(line[6:-1], {"keras_mp": keras_mp, "model": model, "x": x, "y": x})
    assert report.verdict.overflowing[0].path == "square"
    assert report.line == "" or report.cured


def test_the_report_counts_infinities_and_nans_of_each_variable():
    optimizer, variables = make(min_scale=1.0)
    step = stateful_step(optimizer, variables, compiled=False)
    step(FINITE)
    step([np.array([np.inf, 1.0], "float32"), np.float32(1.0)])
    step([np.array([NAN, np.inf], "float32"), np.float32(np.inf)])
    kernel, bias = optimizer.nonfinite_report()
    assert kernel == ("kernel", 2, 2, "inf, nan")
    # An infinity beside a nan in one gradient counts as a nan.
    assert bias == ("bias", 1, 3, "inf")
    assert kernel.path == "kernel" and bias.first_step == 3
    assert values([optimizer._loss_scaling.skipped_steps])[0] == 2


def test_the_report_needs_a_built_optimizer():
    with pytest.raises(ValueError, match="built"):
        keras_mp.LossScaleOptimizer("sgd").nonfinite_report()


def test_variables_of_another_order_are_counted_in_their_place():
    optimizer, variables = make(min_scale=1.0)
    optimizer.build(variables)
    optimizer.apply(tensors([np.float32(np.inf)]), variables[1:])
    assert [line.path for line in optimizer.nonfinite_report()] == ["bias"]


@pytest.mark.skipif(BACKEND != "jax", reason="a stateless loop of JAX")
def test_a_stateless_loop_puts_back_what_a_skipped_step_changed():
    import jax

    optimizer, variables = make()
    optimizer.build(variables)

    @jax.jit
    def step(state, grads, trainable, statistics):
        trainable, state = optimizer.stateless_apply(state, grads, trainable)
        after = {"mean": statistics["mean"] + grads[0], "n": statistics["n"] + 1}
        return (
            trainable,
            state,
            optimizer.stateless_undo_skipped(state, statistics, after),
        )

    trainable = [v.value for v in variables]
    state = [v.value for v in optimizer.variables]
    before = {"mean": jax.numpy.array([0.1, -0.0]), "n": jax.numpy.int32(3)}
    trainable, state, kept = step(state, tensors(BROKEN), trainable, before)
    assert values(kept.values())[0].tobytes() == values(before.values())[0].tobytes()
    assert int(kept["n"]) == 3
    _, _, moved = step(state, tensors(FINITE), trainable, before)
    assert int(moved["n"]) == 4
