"""An interrupt at any moment of `fit` leaves a model that can go on."""

import functools
import signal
import threading

import keras
import numpy as np
import processes
import pytest
from backends import BACKEND, values
from interrupted import counted_model, what_is_wrong
from keras import layers

import keras_mp
from keras_mp import fitting, interrupts
from keras_mp.loss_scaling import retaking
from keras_mp.loss_scaling.optimizer import loss_scaling_of
from keras_mp.tools.breakpoint import overflow_breakpoint

X, Y = np.zeros((64, 64), "float32"), np.zeros((64, 1), "float32")
WAYS = {
    "jax": ["{}", '{"steps_per_execution": 3}'],
    "torch": ["{}", '{"jit_compile": true}'],
}.get(BACKEND, ["{}", '{"run_eagerly": true}'])


def fit(model, **options):
    return model.fit(X, Y, **{"batch_size": 16, "verbose": 0, **options})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow("Many trainings, interrupted at random.")
def test_signals_at_random_moments(way):
    assert processes.run("interrupted.py", way) == [[]]


# Moments, one by one ----------------------------------------------------------------


def interrupt(*args, **kwargs):
    raise KeyboardInterrupt


def look_at_once(optimizer):
    scaling = loss_scaling_of(optimizer)
    scaling.skips.interval = 0
    return scaling


class Raising(layers.Layer):
    """Interrupts where Python runs it: in a trace, or eagerly."""

    armed = False

    def call(self, x):
        if self.armed:
            raise KeyboardInterrupt
        return x


def in_a_call(monkeypatch, fit):
    monkeypatch.setattr(Raising, "armed", True)
    with pytest.raises(KeyboardInterrupt):
        fit()


def in_a_wait(monkeypatch, fit):
    monkeypatch.setattr(retaking, "_outcome", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fit()


def in_a_look(monkeypatch, fit):
    monkeypatch.setattr(keras_mp.LossScaleOptimizer, "raise_if_diverged", interrupt)
    monkeypatch.setattr(fitting, "loss_scaling_of", look_at_once)
    with pytest.raises(KeyboardInterrupt):
        fit()


def in_a_breakpoint(monkeypatch, fit, tmp_path):
    monkeypatch.setattr(overflow_breakpoint.OverflowBreakpoint, "_after", interrupt)
    callback = keras_mp.callbacks.OverflowBreakpoint(tmp_path / "overflow", 1)
    with pytest.raises(KeyboardInterrupt):
        fit(callbacks=[callback])


def raising_model():
    inputs = keras.Input((64,))
    x = layers.BatchNormalization()(layers.Dense(64, dtype="mixed_float16")(inputs))
    model = keras.Model(inputs, layers.Dense(1)(Raising()(x)))
    model.compile(keras_mp.LossScaleOptimizer("adam"), "mse")
    return model


def assert_goes_on(model):
    assert all(np.isfinite(value).all() for value in values(model.variables))
    assert np.isfinite(model.predict(X, verbose=0)).all()
    steps = int(model.optimizer.iterations)
    fit(model)
    assert int(model.optimizer.iterations) == steps + 4


@pytest.mark.parametrize("trained", [False, True], ids=["first fit", "second fit"])
@pytest.mark.parametrize("moment", [in_a_call, in_a_wait, in_a_look, in_a_breakpoint])
@pytest.mark.sampled
def test_a_model_goes_on_after_an_interrupt(moment, trained, monkeypatch, tmp_path):
    model = raising_model()
    if trained:
        fit(model)
        model.make_train_function(force=True)
    more = (tmp_path,) if moment is in_a_breakpoint else ()
    with monkeypatch.context() as patches:
        moment(patches, lambda **options: fit(model, **options), *more)
    assert_goes_on(model)


@pytest.mark.parametrize("moment", [in_a_call, in_a_wait])
def test_after_train_on_batch_as_well(moment, monkeypatch):
    model = raising_model()
    with monkeypatch.context() as patches:
        moment(patches, lambda: model.train_on_batch(X, Y))
    assert_goes_on(model)


# `evaluate` and `predict` -----------------------------------------------------------


class InterruptedBatch(keras.callbacks.Callback):
    def on_test_batch_end(self, batch, logs=None):
        raise KeyboardInterrupt

    on_predict_batch_end = on_test_batch_end


def by_a_callback(run, monkeypatch):
    run(X, Y, callbacks=[InterruptedBatch()])


def by_the_data(run, monkeypatch):
    def batches():
        for batch in (X[:16], X[16:32]):
            yield batch, batch[:, :1]
        raise KeyboardInterrupt

    run(batches())


def by_a_layer(run, monkeypatch):
    monkeypatch.setattr(Raising, "armed", True)
    run(X, Y)


def by_a_signal_within_a_step(run, monkeypatch):
    """It comes when the compiled step has taken the values, and Keras has no others."""
    owner = next(c for c in keras.Model.__mro__ if "_make_function" in vars(c))
    make = owner._make_function
    signals = iter([signal.SIGINT])

    def make_interrupted(self, step, **options):
        def interrupted(*args):
            result = step(*args)
            for number in signals:
                signal.raise_signal(number)
            return result

        return make(self, interrupted, **options)

    monkeypatch.setattr(owner, "_make_function", make_interrupted)
    run(X, Y)


VERBS = {
    "evaluate": lambda model, x, y=None, **options: model.evaluate(x, y, **options),
    "predict": lambda model, x, y=None, **options: model.predict(x, **options),
    "test_on_batch": lambda model, x, y: model.test_on_batch(x, y),
    "predict_on_batch": lambda model, x, y: model.predict_on_batch(x),
}
HOWS = [by_a_callback, by_the_data, by_a_layer]
HOWS += [by_a_signal_within_a_step] if BACKEND == "jax" else []


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.sampled
def test_they_leave_a_model_its_values(verb, how, monkeypatch):
    if "on_batch" in verb and how in (by_a_callback, by_the_data):
        pytest.skip("test_on_batch takes neither callbacks nor a dataset")
    model = raising_model()
    fit(model)
    before = values(model.weights)
    call = functools.partial(VERBS[verb], model)
    # TensorFlow's pipeline turns what data raise into an error of its own.
    in_a_pipeline = BACKEND == "tensorflow" and how is by_the_data
    error = Exception if in_a_pipeline else KeyboardInterrupt
    with monkeypatch.context() as patches, pytest.raises(error):
        how(call, patches)
    for value, expected in zip(values(model.weights), before, strict=True):
        np.testing.assert_array_equal(value, expected)
    assert_goes_on(model)


def test_between_an_update_and_its_counter():
    class Interrupted(keras.optimizers.SGD):
        interrupts = False

        def apply(self, grads, trainable_variables=None):
            super().apply(grads, trainable_variables)
            if self.interrupts:
                signal.raise_signal(signal.SIGINT)
                self.iterations  # noqa: B018 (an instruction before the counters)

    model = counted_model(**({} if BACKEND == "torch" else {"run_eagerly": True}))
    inner = Interrupted(1.0)
    model.compile(
        keras_mp.LossScaleOptimizer(inner),
        model.loss,
        run_eagerly=BACKEND != "torch",
    )
    fit(model)
    inner.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        fit(model)
    inner.interrupts = False
    assert [*what_is_wrong(model)] == []
    if BACKEND != "jax":  # There an eager step, too, returns what `fit` stores.
        assert int(model.optimizer.iterations) == 5
    assert_goes_on(model)


@pytest.mark.skipif(BACKEND != "torch", reason="others have no such mode")
@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
def test_torch_still_computes_gradients(verb):
    import torch

    class InNoGrad(InterruptedBatch):
        """As an interrupt on the way out of a `torch.no_grad`, before it ends."""

        def on_train_batch_end(self, batch, logs=None):
            torch.set_grad_enabled(False)
            raise KeyboardInterrupt

        on_test_batch_end = on_predict_batch_end = on_train_batch_end

    model = raising_model()
    arguments = [X] if verb == "predict" else [X, Y]
    with pytest.raises(KeyboardInterrupt):
        getattr(model, verb)(*arguments, verbose=0, callbacks=[InNoGrad()])
    assert torch.is_grad_enabled()
    assert_goes_on(model)


# Held back --------------------------------------------------------------------------


def test_an_interrupt_waits_for_the_end_of_a_block():
    seen = []
    with pytest.raises(KeyboardInterrupt):
        with interrupts.held(), interrupts.held():
            signal.raise_signal(signal.SIGINT)
            seen.append("held")
    assert seen == ["held"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_within_it_a_part_may_be_interrupted():
    with pytest.raises(KeyboardInterrupt):
        with interrupts.held():
            with interrupts.let_through():
                signal.raise_signal(signal.SIGINT)
            pytest.fail("the interrupt came too late")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_who_ignores_interrupts_goes_on_ignoring_them(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with interrupts.held():
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_are_never_interrupted():
    def block():
        with interrupts.held(), interrupts.let_through():
            pass

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
