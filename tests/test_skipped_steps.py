"""In `fit`, a skipped step never happened."""

import contextlib

import keras
import numpy as np
import pytest
from backends import BACKEND, Chained, same_bits, scaling_model, values

import keras_mp

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 4)).astype("float32")
Y = (X[:, :1] * 2 - X[:, 1:2]).astype("float32")
MODES = {
    "eager": dict(run_eagerly=True),
    "compiled": dict(jit_compile=False) if BACKEND == "tensorflow" else {},
    "XLA": dict(jit_compile=True),
}
if BACKEND == "torch":
    del MODES["XLA"]


def model_under(policy="mixed_float16", model_class=keras.Model, **kwargs):
    keras.utils.set_random_seed(0)
    with keras_mp.policy_scope(policy):
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(8, activation="relu")(inputs)
        hidden = keras.layers.BatchNormalization()(hidden)
        model = model_class(inputs, keras.layers.Dense(1)(hidden))
    optimizer = keras.optimizers.Adam(
        0.01, use_ema=True, ema_momentum=0.9, global_clipnorm=1.0
    )
    model.compile(
        # Low enough that nothing overflows by itself.
        keras_mp.LossScaleOptimizer(optimizer, initial_scale=256.0),
        "mse",
        metrics=["mae", keras.metrics.RootMeanSquaredError()],
        **kwargs,
    )
    return model


def poisoned(at, batch_size=8):
    """The batches in order, with one of infinities put in before each index of `at`."""
    bad = np.full((batch_size, 4), np.inf, "float32")
    for index in range(len(X) // batch_size):
        rows = slice(index * batch_size, (index + 1) * batch_size)
        if index in at:
            yield bad, Y[rows]
        yield X[rows], Y[rows]


def fitted(model, at, **kwargs):
    """Trains for one epoch; broken steps are warned of."""
    warns = pytest.warns(UserWarning, match="whatever the loss scale")
    with warns if at else contextlib.nullcontext():
        return model.fit(
            poisoned(at),
            steps_per_epoch=len(X) // 8 + len(at),
            verbose=0,
            shuffle=False,
            **kwargs,
        )


def trained(at, **kwargs):
    model = model_under(**kwargs)
    history = fitted(model, at)
    inner = model.optimizer.inner_optimizer
    return model, history, values(model.variables + inner.variables)


@pytest.mark.parametrize(
    "model_class", [keras.Model, scaling_model()], ids=["", "its own train step"]
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sampled
def test_a_training_with_poisoned_batches_equals_the_one_without_them(
    mode, model_class
):
    how = dict(model_class=model_class, **MODES[mode])
    _, clean_history, clean_values = trained((), **how)
    model, history, skipped_values = trained((0, 3), **how)
    assert int(model.optimizer.skipped_steps) == 2
    assert float(model.optimizer.loss_scale) == 256.0
    assert same_bits(clean_values, skipped_values)
    assert history.history == clean_history.history


def logged():
    """A list, and a callback that puts the logs of each step into it."""
    seen = []
    return seen, keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(
            {name: float(value) for name, value in logs.items()}
        )
    )


@pytest.mark.parametrize("mode", MODES)
def test_no_batch_log_shows_a_skipped_step(mode):
    seen, callback = logged()
    model = model_under(**MODES[mode])
    fitted(model, (1, 4), callbacks=[callback, keras.callbacks.TerminateOnNaN()])
    assert all(np.isfinite(v) for log in seen for v in log.values())
    # The skipped steps, and those before.
    assert seen[1] == seen[0] and seen[5] == seen[4]
    assert int(model.optimizer.iterations) == 6  # No NaN ended it.


@pytest.mark.parametrize("mode", MODES)
def test_two_skipped_updates_of_one_step_are_one_broken_step(mode):
    class Twice(keras.Model):
        def train_step(self, *args):
            if BACKEND == "jax":
                _, state = super().train_step(*args)
                return super().train_step(state, args[1])
            super().train_step(*args)
            return super().train_step(*args)

    model, _, _ = trained(at={3}, model_class=Twice, **MODES[mode])
    assert model.optimizer.loss_scale == 256.0
    assert model.optimizer.skipped_steps == 1


@pytest.mark.parametrize("mode", MODES)
def test_an_overflow_of_the_scale_alone_lowers_it(mode):
    model = model_under(**MODES[mode])
    model.optimizer.dynamic_scale.assign(2.0**24)
    model.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
    assert int(model.optimizer.skipped_steps) > 0
    assert float(model.optimizer.loss_scale) < 2.0**24


@pytest.mark.parametrize("mode", MODES)
def test_a_fit_whose_every_step_is_skipped_changes_nothing(mode):
    # Keras' finalization would write the averages, still zero, into the weights.
    model = model_under(**MODES[mode])
    kept = model.trainable_variables + model.non_trainable_variables
    before = values(kept)
    with pytest.warns(UserWarning, match="whatever the loss scale"):
        model.fit(np.full_like(X, np.inf), Y, batch_size=8, verbose=0)
    assert same_bits(before, values(kept))
    assert int(model.optimizer.iterations) == 0


def test_swapping_averages_in_survives_a_fit_whose_every_step_is_skipped():
    model = model_under()
    before = values(model.trainable_variables)
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    with pytest.warns(UserWarning, match="whatever the loss scale"):
        model.fit(np.full_like(X, np.inf), Y, batch_size=8, verbose=0, callbacks=[swap])
    assert same_bits(before, values(model.trainable_variables))


def test_one_bad_sample_in_each_of_200_epochs_keeps_the_scale_and_learns():
    x, y = X[:16].copy(), Y[:16]
    model = model_under()
    untrained = model.evaluate(x, y, verbose=0)[0]
    x[9, 2] = np.nan
    with pytest.warns(UserWarning, match="whatever the loss scale"):
        model.fit(x, y, batch_size=8, epochs=200, verbose=0, shuffle=False)
    assert int(model.optimizer.skipped_steps) == 200
    assert float(model.optimizer.loss_scale) == 256.0
    assert model.evaluate(x[:8], y[:8], verbose=0)[0] < 0.2 * untrained


def test_the_history_says_how_many_steps_were_skipped():
    monitor = keras_mp.callbacks.LossScaleMonitor()
    history = fitted(model_under(), (0, 3), callbacks=[monitor]).history
    assert history["skipped_steps"] == [2] and history["loss_scale"] == [256.0]


@pytest.mark.parametrize("bad", [1, 37, 99])
def test_the_logs_stay_finite_when_one_batch_in_a_hundred_overflows(bad):
    x = np.tile(X[:8], (100, 1))
    x[8 * bad] = 2.0**120  # Finite, and its activations in float16 are not.
    y = np.tile(Y[:8], (100, 1))
    model = model_under()
    with pytest.warns(UserWarning, match="^1 of "):
        history = model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    assert all(np.isfinite(v) for column in history.history.values() for v in column)
    assert int(model.optimizer.iterations) == 99


def full_batch_model():
    """A model whose first steps, at its scale, are all skipped; a batch an epoch."""
    model = model_under()
    model.optimizer.dynamic_scale.assign(2.0**24)
    model.optimizer._loss_scaling.retakes = False
    return model


def test_an_epoch_of_skipped_steps_logs_the_last_loss_and_is_never_the_best():
    model = full_batch_model()
    best = keras.callbacks.EarlyStopping(
        "loss", patience=20, restore_best_weights=True, start_from_epoch=0
    )
    untrained = values(model.trainable_variables)
    history = model.fit(
        X * 8, Y, batch_size=48, epochs=20, verbose=0, callbacks=[best]
    ).history
    skipped = int(model.optimizer.skipped_steps)
    assert 0 < skipped < 19
    loss = history["loss"]
    # The first step that is not skipped finds the same weights and statistics.
    assert loss[:skipped] == pytest.approx([loss[skipped]] * skipped, rel=1e-5)
    assert loss[skipped] > loss[-1] > 0
    mae = history["mae"]
    assert mae[:skipped] == pytest.approx([mae[skipped]] * skipped, rel=1e-5)
    assert np.isfinite(best.best) and best.best > 0
    assert not same_bits(untrained, values(model.trainable_variables))


def test_an_epoch_whose_every_step_was_broken_has_no_loss_rather_than_the_best():
    model = model_under()
    with pytest.warns(UserWarning, match="whatever the loss scale"):
        history = model.fit(np.full_like(X, np.nan), Y, batch_size=8, verbose=0)
    assert np.isnan(history.history["loss"]).all()
    assert np.isfinite(model.evaluate(X, Y, verbose=0)).all()


@pytest.mark.parametrize("mode", MODES)
def test_the_first_logs_of_an_epoch_are_the_steps_own_if_it_was_skipped(mode):
    seen, callback = logged()
    model = full_batch_model()
    untrained = model.evaluate(X[:8], Y[:8], verbose=0)[0]
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=[callback])
    assert int(model.optimizer.skipped_steps) > 0
    # In training mode, BatchNormalization uses the batch's own statistics.
    assert 0 < seen[0]["loss"] < 100 * untrained


def test_a_loss_that_is_not_finite_is_skipped_even_if_its_gradients_are():
    # The gradient of an absolute error is a sign. Applied, the step would leave an
    # infinity in the loss of the epoch, to be blamed for each overflow to come.
    x, y = np.tile(X, (2, 1)), np.tile(Y, (2, 1))
    y[0] = np.inf
    model = model_under()
    optimizer = keras_mp.LossScaleOptimizer(
        keras.optimizers.SGD(1e-3), 256.0, dynamic_growth_steps=1, retake_steps=0
    )
    model.compile(optimizer, "mae")
    with pytest.warns(UserWarning, match="^1 of"):
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert int(optimizer._loss_scaling.broken_steps) == 1
    assert int(optimizer.iterations) + int(optimizer.skipped_steps) == 12
    assert int(optimizer.iterations) >= 4


def test_a_batch_without_a_loss_does_not_report_the_best_one():
    logs = model_under().train_on_batch(X[:8] * np.nan, Y[:8], return_dict=True)
    assert np.isnan(logs["loss"])


class Averaging(keras.Model):
    """Keeps a frozen teacher at an average of itself, as `train_step` of its own."""

    def train_step(self, *args):
        teacher = self.layers[-1]
        for weight in teacher.weights:
            weight.assign(weight * 0.5)
            weight.assign_add(keras.ops.ones_like(weight))
        return super().train_step(*args)


def frozen_model(**kwargs):
    with keras_mp.policy_scope("mixed_float16"):
        inputs = keras.Input((4,))
        teacher = keras.layers.Dense(300, name="teacher")
        outputs = keras.layers.Dense(1)(inputs)
        model = Averaging(inputs, [outputs, teacher(inputs)])
    teacher.trainable = False
    optimizer = keras_mp.LossScaleOptimizer("sgd", initial_scale=256.0)
    model.compile(optimizer, ["mse", None], **kwargs)
    return model, teacher


@pytest.mark.skipif(BACKEND == "jax", reason="a train_step of JAX assigns nothing")
def test_frozen_weights_that_a_skipped_step_assigned_to_are_what_they_were():
    model, teacher = frozen_model()
    before = values(teacher.weights)
    with pytest.warns(UserWarning, match="whatever the loss scale"):
        model.fit(np.full((8, 4), np.inf, "float32"), Y[:8], verbose=0)
    assert same_bits(before, values(teacher.weights))
    model.fit(X[:8], Y[:8], verbose=0)
    wanted = [b * 0.5 + 1 for b in before]
    assert same_bits(wanted, values(teacher.weights))
    assert "_direct_assign" not in vars(teacher.kernel)


class WritesItself(keras.layers.Dense):
    def call(self, inputs):
        self.kernel.assign(self.kernel)
        return super().call(inputs)


@pytest.mark.skipif(BACKEND != "torch", reason="variables are assigned to eagerly")
def test_a_frozen_weight_assigned_to_within_a_layer_keeps_its_precision():
    with keras_mp.policy_scope("mixed_float16"):
        inputs = keras.Input((4,))
        frozen = WritesItself(3, trainable=False)
        model = keras.Model(inputs, keras.layers.Dense(1)(frozen(inputs)))
    model.compile(keras_mp.LossScaleOptimizer("sgd", initial_scale=256.0), "mse")
    frozen.set_weights([np.full((4, 3), 1e6 + 1 / 16, "float32"), np.zeros(3)])
    before = values(frozen.weights)
    with pytest.warns(UserWarning, match="whatever the loss scale"):
        model.fit(np.full((8, 4), np.inf, "float32"), Y[:8], verbose=0)
    assert same_bits(before, values(frozen.weights))


@pytest.mark.skipif(BACKEND != "torch", reason="variables are assigned to eagerly")
def test_a_step_within_a_step_notes_writes_and_leaves_the_outer_one_to_it():
    class Outer(Averaging):
        def train_step(self, *args):
            result = super().train_step(*args)
            self.inner.train_on_batch(X[:8], Y[:8])
            self.teacher.kernel.assign(self.teacher.kernel * 2.0)
            return result

    model, teacher = frozen_model()
    outer = Outer(model.inputs, model.outputs)
    outer.inner, outer.teacher = model, teacher
    optimizer = keras_mp.LossScaleOptimizer("sgd", initial_scale=256.0)
    outer.compile(optimizer, ["mse", None])
    before = values(teacher.weights)
    with pytest.warns(UserWarning, match="whatever the loss scale"):
        outer.fit(np.full((8, 4), np.inf, "float32"), Y[:8], verbose=0)
    assert same_bits(before, values(teacher.weights))
    assert "_direct_assign" not in vars(teacher.kernel)


@pytest.mark.skipif(BACKEND != "torch", reason="tensors that are copied")
def test_frozen_weights_are_not_copied_at_each_step(monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    model, teacher = frozen_model()
    monkeypatch.setattr(Averaging, "train_step", keras.Model.train_step)
    copied = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket.__name__ in ("clone", "copy_", "_foreach_copy_"):
                copied.extend(tuple(x.shape) for x in keras.tree.flatten(args[:2]))
            return function(*args, **(kwargs or {}))

    model.train_on_batch(X[:8], Y[:8])
    with Copies():
        model.train_on_batch(X[:8], Y[:8])
    assert copied and tuple(teacher.kernel.shape) not in copied


class Total(keras.metrics.Metric):
    """A sum, which is 0 where nothing is wrong; it has no count."""

    def __init__(self):
        super().__init__(name="total")
        self.total = self.add_weight(initializer="zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.sum(0.0 * y_pred))

    def result(self):
        return self.total.value


def test_after_a_skipped_last_step_evaluate_reports_metrics_that_are_zero():
    class Measured(keras.Sequential):
        @property
        def metrics(self):
            return [self.total]

        def test_step(self, *args):
            if BACKEND != "jax":
                x, y = args[0]
                self.total.update_state(y, self(x))
                return {"total": self.total.result()}
            return {"total": args[0][2][0]}, args[0]

    model = Measured([keras.Input((2,)), keras.layers.Dense(1)])
    model.total = Total()
    optimizer = keras_mp.LossScaleOptimizer("sgd")
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    optimizer.scale_loss(1.0)
    optimizer.apply([np.inf * keras.ops.ones(v.shape) for v in model.weights])
    assert not optimizer.last_step_finite
    optimizer._loss_scaling.steps_to_measure = False  # As after a `fit`.
    x, y = np.ones((4, 2)), np.ones((4, 1))
    assert model.evaluate(x, y, verbose=0, return_dict=True) == {"total": 0.0}
    assert {k: float(v) for k, v in model.get_metrics_result().items()} == {"total": 0}


@pytest.mark.skipif(BACKEND != "torch", reason="only torch has modules and generators")
@pytest.mark.parametrize("retake_steps", [0, 100])
def test_what_is_no_variable_of_keras_is_as_if_the_step_had_not_been(retake_steps):
    import torch

    def trained(*batches):
        keras.utils.set_random_seed(0)
        modules = torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)
        wrapped = [keras.layers.TorchModuleWrapper(module) for module in modules]
        model = Chained([*wrapped, keras.layers.Dense(1)])
        model(X[:8])
        optimizer = keras_mp.LossScaleOptimizer("sgd", 256.0, retake_steps=retake_steps)
        model.compile(optimizer, "mse")
        for batch in batches:
            model.train_on_batch(batch, Y[:8])
        buffers = [x.numpy() for x in modules[0].buffers()]
        assert np.isfinite(buffers[0]).all()
        return [*values(model.weights), *buffers, torch.get_rng_state().numpy()]

    broken = np.full((8, 4), np.inf, "float32")
    found = trained(X[:8], broken, X[8:16])
    assert same_bits(found, trained(X[:8], X[8:16]))
