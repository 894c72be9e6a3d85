"""In `fit` a batch that is skipped is taken again at the lower scale: none is lost."""

import warnings

import keras
import numpy as np
import pytest
from backends import (
    BACKEND,
    Batches,
    Chained,
    batches_of,
    loader,
    same_bits,
    scaling_model,
    state_of,
    tf_data,
    values,
)
from keras import layers
from processes import on_four_devices

import keras_mp
from keras_mp.loss_scaling import retaking

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(scale=30, size=(48, 16)).astype("float32")
Y = RANDOM.integers(0, 4, 48)
BATCHES = batches_of(X, Y, size=8)
HIGH = 2.0**28  # Ten halvings and more from what fits.
WAYS = {
    "compiled": {},
    "eagerly": {"run_eagerly": True},
    "three steps per execution": {"steps_per_execution": 3},
}
if BACKEND == "torch":
    WAYS = {"eagerly": {}}
if BACKEND == "jax":
    del WAYS["eagerly"]
ways = pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)


def network(model_class=keras.Model):
    """With statistics and random numbers, which a skipped step must not move."""
    keras.utils.set_random_seed(0)
    with keras_mp.policy_scope("mixed_float16"):
        inputs = keras.Input((16,))
        x = layers.Dense(8)(inputs)
        x = layers.BatchNormalization()(x)
        x = layers.Dropout(0.3)(layers.ReLU()(x))
        return model_class(inputs, layers.Dense(4)(layers.Dense(8)(x)))


def scaler(scale=HIGH, inner="adam", **options):
    return keras_mp.LossScaleOptimizer(
        inner, scale, max_scale=2.0**60, **{"retake_steps": 100, **options}
    )


def compiled(optimizer, model=None, **how):
    model = model or network()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **how)
    return model


def after_each_batch(look):
    """A callback, and a list of what `look(batch, logs)` says of each batch."""
    seen = []
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(look(batch, logs))
    )
    return callback, seen


def trained(optimizer, model=None, epochs=2, x=X, callbacks=(), **how):
    """A model, its history, and the logs of each batch."""
    model = compiled(optimizer, model, **how)
    batches, seen = after_each_batch(
        lambda batch, logs: (batch, {k: float(v) for k, v in logs.items()})
    )
    keras.utils.set_random_seed(1)
    options = dict(batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    history = model.fit(x, Y, callbacks=[batches, *callbacks], **options)
    return model, history.history, seen


def assert_equal(one, other):
    (one, *logs), (other, *other_logs) = one, other
    assert logs == other_logs
    assert same_bits(state_of(one), state_of(other))


def assert_none_is_lost(train):
    """From too high a scale `train(scale)` is as from the one where it ends."""
    retaken = train(HIGH)
    scale = float(retaken[0].optimizer.loss_scale)
    assert scale < HIGH
    assert_equal(retaken, train(scale))
    return retaken[0]


# As if it had begun at the right scale ----------------------------------------------


@ways
def test_a_training_from_too_high_a_scale_is_the_one_from_the_right_scale(how):
    retaken = trained(scaler(), **how)
    optimizer = retaken[0].optimizer
    assert int(optimizer.iterations) == 12 and int(optimizer.skipped_steps) >= 10
    assert float(optimizer.loss_scale) == HIGH / 2.0 ** int(optimizer.skipped_steps)
    right = trained(scaler(float(optimizer.loss_scale)), **how)
    assert int(right[0].optimizer.skipped_steps) == 0
    assert_equal(retaken, right)
    steps = how.get("steps_per_execution", 1)
    ends = range(steps - 1, 6, steps)
    assert [batch for batch, _ in retaken[2]] == [*ends, *ends]


@pytest.mark.parametrize("inner", ["sgd", "accumulating", "rounding"])
def test_whatever_the_optimizer_is(inner):
    def train(scale):
        steps = 2 if inner == "accumulating" else None
        optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=steps)
        if inner == "rounding":
            optimizer = keras_mp.StochasticRoundingOptimizer("adam", seed=1)
        return trained(scaler(scale, optimizer))

    assert_none_is_lost(train)


def test_train_on_batch_takes_it_again():
    def losses(scale):
        model = compiled(scaler(scale))
        keras.utils.set_random_seed(1)
        return model, [model.train_on_batch(*b, return_dict=True) for b in BATCHES]

    assert int(assert_none_is_lost(losses).optimizer.iterations) == 6


def test_what_tensorflow_builds_in_its_first_step_is_taken_again():
    keras.utils.set_random_seed(0)
    with keras_mp.policy_scope("mixed_float16"):
        model = Chained([layers.Dense(8, activation="relu"), layers.Dense(4)])
    # The optimizer is wrapped once it is known what the model computes in.
    model, *_ = trained(keras.optimizers.SGD(1e-6), model, x=X * 30)
    assert int(model.optimizer.skipped_steps) > 0
    assert int(model.optimizer.iterations) == 12


DATA = {
    "a generator": lambda: (batch for batch in BATCHES),
    "tf.data": lambda: tf_data(X, Y, size=8),
    "a DataLoader": lambda: loader(X, Y, size=8),
    "a PyDataset": lambda: Batches(*BATCHES),
}


@pytest.mark.parametrize("make", DATA.values(), ids=DATA)
def test_whatever_the_data_are(make):
    def fitted(scale):
        model = compiled(scaler(scale))
        keras.utils.set_random_seed(1)
        options = dict(steps_per_epoch=6, shuffle=False, verbose=0)
        validation = X[:16], Y[:16]
        history = model.fit(make(), validation_data=validation, **options)
        return model, history.history

    assert int(assert_none_is_lost(fitted).optimizer.iterations) == 6


def test_where_nothing_overflows_the_scales_are_those_of_keras():
    def scales(wrapper):
        adam = keras.optimizers.Adam()
        optimizer = wrapper(adam, initial_scale=4.0, dynamic_growth_steps=3)
        callback, seen = after_each_batch(
            # On JAX a callback that reads `model` gets the state of that batch.
            lambda *_: values([callback.model.optimizer.dynamic_scale])[0].item()
        )
        trained(optimizer, callbacks=[callback])
        return seen

    ours = scales(keras_mp.LossScaleOptimizer)
    assert ours == scales(keras.optimizers.LossScaleOptimizer)
    assert ours[-1] == 2.0**6


# For how long -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("retake_steps", "applied"), [(0, False), (5, False), (7, True), (None, True)]
)
def test_it_is_the_first_steps_that_are_taken_again(retake_steps, applied):
    model = compiled(scaler(2.0**4, retake_steps=retake_steps))
    model.fit(X, Y, batch_size=8, verbose=0)
    optimizer = model.optimizer
    assert int(optimizer.skipped_steps) == 0
    optimizer.dynamic_scale.assign(HIGH)
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)  # The seventh step.
    assert int(optimizer.iterations) == 6 + applied
    assert (int(optimizer.skipped_steps) == 1) == (not applied)


def test_a_checkpoint_says_how_many_steps_there_were(tmp_path):
    for applied in (12, 13):  # The second one may take its thirteenth step again.
        model, *_ = trained(scaler(2.0**4, retake_steps=applied))
        model.save(tmp_path / "model.keras")
        opened = keras.models.load_model(tmp_path / "model.keras")
        assert opened.optimizer.retake_steps == applied
        opened.optimizer.dynamic_scale.assign(HIGH)
        opened.fit(X[:8], Y[:8], verbose=0)
        assert int(opened.optimizer.iterations) == applied


def test_its_config_has_it_unless_it_is_the_default():
    for steps in (0, 7, None):
        optimizer = keras_mp.LossScaleOptimizer("sgd", retake_steps=steps)
        again = type(optimizer).from_config(optimizer.get_config())
        assert again.retake_steps == steps
        assert f"retake_steps={steps}" in repr(again)
    assert "retake_steps" not in keras_mp.LossScaleOptimizer("sgd").get_config()


@pytest.mark.parametrize("steps", [-1, 1.5, True, "all"])
def test_a_bad_number_is_refused(steps):
    with pytest.raises(ValueError, match="`retake_steps` must be a whole number of at"):
        keras_mp.LossScaleOptimizer("sgd", retake_steps=steps)


# What is not taken again ------------------------------------------------------------


class OwnStep(keras.callbacks.Callback):
    """Applies infinite gradients of its own after the second batch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            variables = self.model.trainable_variables
            infinite = [keras.ops.full(v.shape, np.inf) for v in variables]
            self.model.optimizer.scale_loss(1.0)
            self.model.optimizer.apply(infinite, variables)


def test_a_callbacks_own_skipped_step_makes_no_batch_count_twice():
    model, *_ = trained(scaler(2.0**4), epochs=1, callbacks=[OwnStep()])
    optimizer = model.optimizer
    assert (int(optimizer.iterations), int(optimizer.skipped_steps)) == (6, 1)
    right, *_ = trained(scaler(2.0**4), epochs=1)
    for one, other in zip(state_of(model), state_of(right), strict=True):
        # From there on the scale is half as high: the smallest gradients round.
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


class Rooted(layers.Layer):
    """Its gradient at 0 is not finite, whatever the scale; the loss is."""

    def call(self, x):
        return x + keras.ops.sqrt(x[:, :1] * 0.0)


def rooted():
    keras.utils.set_random_seed(0)
    with keras_mp.policy_scope("mixed_float16"):
        inputs = keras.Input((16,))
        outputs = layers.Dense(4)(Rooted()(layers.Dense(8)(inputs)))
        return keras.Model(inputs, outputs)


@ways
def test_a_batch_that_no_scale_suits_is_skipped_once(how):
    trainings = [
        trained(scaler(2.0**10, retake_steps=steps), rooted(), epochs=1, **how)
        for steps in (100, 0)
    ]
    for model, *_ in trainings:
        optimizer = model.optimizer
        assert int(optimizer.iterations) == 0
        assert int(optimizer.skipped_steps) == int(optimizer.consecutive_skips) == 6
    assert_equal(*trainings)
    retaken, never = (model.optimizer for model, *_ in trainings)
    assert same_bits(values(retaken.variables), values(never.variables))


def test_a_loss_that_is_not_finite_is_not_taken_again():
    x = X.copy()
    x[8:16] = np.nan
    with pytest.warns(UserWarning, match="the loss is not finite"):
        model, *_ = trained(scaler(2.0**4), x=x, epochs=1)
    assert int(model.optimizer.skipped_steps) == 1
    assert int(model.optimizer.iterations) == 5
    assert float(model.optimizer.loss_scale) == 2.0**4


def test_a_fixed_scale_is_tried_once():
    optimizer = keras_mp.LossScaleOptimizer("sgd", HIGH, dynamic=False, max_scale=HIGH)
    with pytest.warns(UserWarning, match="whatever the loss scale"):
        model, *_ = trained(optimizer, epochs=1)
    assert int(model.optimizer.skipped_steps) == 6


def test_a_step_with_a_second_optimizer_is_not_taken_again():
    counted, other = keras.Variable(0.0), keras.optimizers.SGD(1.0)
    other.build([counted])

    class Twice(keras.Model):
        def train_step(self, *args):
            one = keras.ops.convert_to_tensor(-1.0)
            if BACKEND == "jax":  # Where nothing else can be written.
                state = [v.value for v in other.variables]
                other.stateless_apply(state, [one], [counted.value])
            else:
                other.apply([one], [counted])
            return super().train_step(*args)

    model, *_ = trained(scaler(), network(Twice), epochs=1)
    skipped = int(model.optimizer.skipped_steps)
    assert skipped > 1 and int(model.optimizer.iterations) == 6 - skipped
    if BACKEND != "jax":  # Once for each batch.
        assert values([counted]) == [6.0]


@pytest.mark.skipif(BACKEND != "tensorflow", reason="its graphs show it")
def test_a_step_that_calls_python_is_not_taken_again():
    import tensorflow as tf

    calls = []

    class Calling(keras.Model):
        def train_step(self, data):
            tf.numpy_function(lambda x: calls.append(len(x)), [data[0]], [])
            return super().train_step(data)

    model, *_ = trained(scaler(), network(Calling), epochs=1, jit_compile=False)
    assert calls == [8] * 6
    skipped = int(model.optimizer.skipped_steps)
    assert skipped > 1 and int(model.optimizer.iterations) == 6 - skipped


def test_a_train_step_of_the_users_that_scales_is_taken_again():
    model = network(scaling_model())
    trained(scaler(), model)
    assert int(model.optimizer.skipped_steps) >= 10
    assert int(model.optimizer.iterations) == 12


@pytest.mark.skipif(BACKEND != "jax", reason="keras.distribution")
@pytest.mark.slow("Several devices or processes; one such test stays in `make test`.")
def test_on_several_devices_too():
    for found in on_four_devices("retaking_on_devices.py").values():
        assert found.pop("overflowed") == np.log2(found.pop("halvings")) >= 10
        assert found == {
            "applied": 12,
            "overflowed at the right scale": 0,
            "logs are equal": True,
            "differ": [],
            "devices": 4,
        }


# Beside it --------------------------------------------------------------------------


def test_skips_in_a_row_are_counted_by_batches():
    # Ten tries at the first batch are no row of skips.
    model, *_ = trained(scaler(max_consecutive_skips=2))
    assert int(model.optimizer.iterations) == 12
    with pytest.raises(keras_mp.TrainingDivergedError, match="2 steps in a row"):
        trained(scaler(2.0**10, max_consecutive_skips=2), rooted())


def test_the_breakpoint_is_for_batches_that_are_skipped(tmp_path):
    def watched(model):
        stop = keras_mp.callbacks.OverflowBreakpoint(tmp_path / "overflow", skips=2)
        return trained(scaler(2.0**20), model, callbacks=[stop])

    model, *_ = watched(network())
    assert int(model.optimizer.skipped_steps) > 2
    assert int(model.optimizer.iterations) == 12
    assert not list(tmp_path.rglob("*.json"))
    watched(rooted())
    assert list(tmp_path.rglob("*.json"))


def test_the_monitor_counts_tries():
    monitor = keras_mp.callbacks.LossScaleMonitor()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The loss scale has fallen")  # As it has.
        model, history, seen = trained(scaler(), callbacks=[monitor])
    skipped = int(model.optimizer.skipped_steps)
    assert history["skipped_steps"][-1] == skipped >= 10
    assert seen[-1][1]["loss_scale"] == HIGH / 2.0**skipped


def test_after_an_error_in_a_try_the_training_goes_on(monkeypatch):
    tries, original = 0, retaking._outcome

    def failing(*args):
        nonlocal tries
        tries += 1
        if tries == 4:
            raise RuntimeError("stopped")
        return original(*args)

    monkeypatch.setattr(retaking, "_outcome", failing)
    model = compiled(scaler())
    with pytest.raises(RuntimeError, match="stopped"):
        model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    monkeypatch.undo()
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 6
