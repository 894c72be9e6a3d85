"""`fit` and its relatives: float16 training follows float32 and survives overflow."""

import warnings

import keras
import numpy as np
import pytest
from backends import BACKEND, guide_model, same_bits, scaling_model, values

import keras_mp
from keras_mp.loss_scaling import summary

layers = keras.layers

RNG = np.random.default_rng(0)
# Small enough for gradients times 32768 to fit in float16.
X = RNG.normal(scale=0.5, size=(48, 3)).astype("float32")
Y = X @ np.array([[0.5], [-0.5], [0.25]], "float32") + 0.1
# One infinity an example: tanh makes it 1, so that the loss is finite whatever the
# weights, and the gradient of the first kernel is inf * 0.
POISONED = X.copy()
POISONED[:8, 0] = np.inf

# What compile takes to run a step in each of the ways there are.
WAYS = {
    "eagerly": {"run_eagerly": True},
    "jitted": {"jit_compile": True},
    "not jitted": {"jit_compile": False},
    "three steps per execution": {"steps_per_execution": 3},
}
if BACKEND == "torch":
    WAYS = {"eagerly": {}}
ways = pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)


def regression(policy, model_class=keras.Model):
    """A small net, with the same initial weights under each policy."""
    keras.utils.set_random_seed(1)
    with keras_mp.policy_scope(policy):
        inputs = keras.Input((3,))
        hidden = layers.Dense(4, activation="tanh")(inputs)
        return model_class(inputs, layers.Dense(1)(hidden))


def compiled(optimizer=None, policy="mixed_float16", model_class=keras.Model, **how):
    model = regression(policy, model_class)
    model.compile(optimizer or keras.optimizers.SGD(0.1), "mse", **how)
    return model


def fit(model, x=X, y=Y, epochs=1):
    history = model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return history.history["loss"]


def trained(policy, **options):
    model = compiled(policy=policy, **options)
    return model, fit(model, epochs=3)


@pytest.fixture(scope="module")
def float32():
    return trained("float32")


def assert_close(weights, expected, atol=4e-3):
    for a, b in zip(weights, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=atol)


def assert_follows(model, reference):
    assert reference[1][-1] < 0.5 * reference[1][0], "The reference learns nothing."
    assert_close(model[0].get_weights(), reference[0].get_weights())
    np.testing.assert_allclose(model[1], reference[1], rtol=2e-2)


# Following float32 ----------------------------------------------------------------


@ways
def test_float16_training_follows_float32_training(float32, how):
    model, losses = trained("mixed_float16", **how)
    assert_follows((model, losses), float32)
    assert int(model.optimizer.iterations) == 18
    assert int(model.optimizer.skipped_steps) == 0
    start = regression("float32").get_weights()
    for weight, before in zip(model.get_weights(), start, strict=True):
        assert np.abs(weight - before).max() > 1e-3


def test_bfloat16_training_follows_float32_training(float32):
    model, _ = trained("mixed_bfloat16")
    assert_close(model.get_weights(), float32[0].get_weights(), atol=3e-2)


def test_the_scale_grows_within_fit_and_the_training_does_not_notice(float32):
    optimizer = keras_mp.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=8.0, dynamic_growth_steps=3
    )
    model = trained("mixed_float16", optimizer=optimizer)
    assert_follows(model, float32)
    assert float(optimizer.loss_scale) == 8.0 * 2**6


def test_train_on_batch_follows_fit(float32):
    model = compiled()
    for _ in range(3):
        for start in range(0, 48, 8):
            model.train_on_batch(X[start : start + 8], Y[start : start + 8])
    assert int(model.optimizer.iterations) == 18
    assert_close(model.get_weights(), float32[0].get_weights())


def test_fit_may_be_called_again_and_again(float32):
    model = compiled()
    losses = [fit(model)[0] for _ in range(3)]
    assert_follows((model, losses), float32)
    assert int(model.optimizer.step_counter) == 18


def test_what_fit_reports_evaluate_and_predict_agree_with_float32(float32):
    model, losses = trained("mixed_float16")
    assert losses[0] == pytest.approx(float32[1][0], rel=1e-2)
    reference = float32[0].predict(X, verbose=0)
    np.testing.assert_allclose(model.predict(X, verbose=0), reference, atol=1e-2)
    loss = model.evaluate(X, Y, verbose=0)
    assert loss == pytest.approx(float32[0].evaluate(X, Y, verbose=0), abs=1e-2)


def test_clipping_of_the_inner_optimizer_sees_unscaled_gradients():
    clipped = [
        trained(policy, optimizer=keras.optimizers.SGD(0.1, global_clipnorm=0.5))
        for policy in ("mixed_float16", "float32")
    ]
    assert_follows(*clipped)


def test_a_loss_scale_factor_of_the_optimizer_trains_as_float32(float32):
    optimizer = keras.optimizers.SGD(0.1, loss_scale_factor=1024.0)
    assert_follows(trained("mixed_float16", optimizer=optimizer), float32)


# Train steps of the user's own ----------------------------------------------------


@pytest.mark.parametrize("how", [{"run_eagerly": True}, {}], ids=str)
def test_an_overridden_train_step_that_scales_follows_float32(float32, how):
    model, losses = trained("mixed_float16", model_class=scaling_model(), **how)
    assert_follows((model, losses), float32)
    assert isinstance(model.optimizer, keras_mp.LossScaleOptimizer)
    assert int(model.optimizer.step_counter) == 18


@pytest.mark.parametrize("fits", [[3], [1, 1, 1]], ids=["in one fit", "in three"])
@pytest.mark.parametrize("how", [{"run_eagerly": True}, {}], ids=str)
def test_the_train_step_of_the_guide_follows_float32_and_says_so_once(
    float32, how, fits
):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = compiled(model_class=guide_model(), **how)
        losses = [loss for epochs in fits for loss in fit(model, epochs=epochs)]
    ours = [str(w.message) for w in caught if "scale_loss" in str(w.message)]
    assert len(ours) == 1, ours
    name = model.optimizer.inner_optimizer.name
    assert f"never calls `scale_loss` of optimizer {name!r}" in ours[0]
    assert_follows((model, losses), float32)
    assert isinstance(model.optimizer, keras_mp.LossScaleOptimizer)


def test_the_train_step_of_the_guide_says_nothing_where_nothing_is_scaled(float32):
    assert_follows(trained("float32", model_class=guide_model()), float32)


def test_an_overridden_train_step_that_calls_super_follows_float32(float32):
    class Counting(keras.Model):
        steps = 0

        def train_step(self, *args):
            type(self).steps += 1
            return super().train_step(*args)

    assert_follows(trained("mixed_float16", model_class=Counting), float32)
    assert Counting.steps >= 1


class Gan(keras.Model):
    """As in Keras' guides: two models, whose optimizers its own `compile` takes."""

    def __init__(self, scales=False, factor=1.0):
        super().__init__()
        self.discriminator = keras.Sequential(
            [keras.Input((2,)), layers.Dense(4, activation="relu"), layers.Dense(1)]
        )
        self.generator = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
        self.scales, self.factor = scales, factor
        self.built = True

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer

    def update(self, model, optimizer, loss_of):
        variables = model.trainable_variables
        scaled = optimizer.scale_loss if self.scales else lambda loss: loss
        if BACKEND == "torch":
            self.zero_grad()
            scaled(loss_of()).backward()
            gradients = [v.value.grad for v in variables]
        else:
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = scaled(loss_of())
            gradients = tape.gradient(loss, variables)
        optimizer.apply(gradients, variables)

    def train_step(self, real):
        noise = keras.ops.ones((keras.ops.shape(real)[0], 3))

        def score(images):
            return keras.ops.mean(self.discriminator(images)) * self.factor

        def d_loss():
            return score(keras.ops.concatenate([self.generator(noise), real], axis=0))

        def g_loss():
            return score(self.generator(noise))

        self.update(self.discriminator, self.d_optimizer, d_loss)
        self.update(self.generator, self.g_optimizer, g_loss)
        return {"loss": d_loss()}


def trained_gan(policy, **arguments):
    keras.utils.set_random_seed(0)
    with keras_mp.policy_scope(policy):
        gan = Gan(**arguments)
        before = gan.get_weights()
        rate = 0.1 / gan.factor
        gan.compile(*(keras.optimizers.SGD(rate, name=f"{x}_sgd") for x in "dg"))
        gan.fit(np.ones((4, 2), "float32"), batch_size=2, epochs=2, verbose=0)
    return gan, [a - b for a, b in zip(gan.get_weights(), before, strict=True)]


not_on_jax = pytest.mark.skipif(
    BACKEND == "jax", reason="`fit` on JAX knows the state of one optimizer"
)


@not_on_jax
def test_a_gan_of_the_guides_names_each_optimizer_that_scales_nothing():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, moved = trained_gan("mixed_float16")
    ours = [str(w.message) for w in caught if "scale_loss" in str(w.message)]
    names = ["d_sgd", "g_sgd"]
    assert [name for name in names for text in ours if repr(name) in text] == names
    assert len(ours) == 2
    assert_close(moved, trained_gan("float32")[1], atol=2e-3)


@not_on_jax
def test_a_gan_that_scales_trains_where_float16_underflows_and_is_summarized():
    summary.start()
    gan, moved = trained_gan("mixed_float16", factor=1e-8, scales=True)
    assert summary.lines() == [
        f"{name}: loss scale 32768, 4 steps, 0 skipped" for name in ("d_sgd", "g_sgd")
    ]
    reference = trained_gan("float32", factor=1e-8)[1]
    assert all(np.any(delta) for delta in reference)
    assert_close(moved, reference, atol=2e-3)
    for optimizer in (gan.d_optimizer, gan.g_optimizer):
        assert int(optimizer.skipped_steps) == 0 and int(optimizer.iterations) == 4


def test_a_train_step_is_the_users_own_again_after_fit():
    def train_step(*args):
        return type(model).train_step(model, *args)

    model = regression("mixed_float16")
    model.train_step = train_step
    model.compile("sgd", "mse")
    fit(model)
    assert model.train_step is train_step
    del model.train_step
    assert model.train_step.__func__ is keras.Model.train_step


# Overflow -------------------------------------------------------------------------


@ways
def test_a_poisoned_batch_is_skipped_and_training_goes_on(how):
    model = compiled(**how)
    fit(model, POISONED)
    optimizer = model.optimizer
    assert int(optimizer.skipped_steps) == 1
    assert int(optimizer.iterations) == int(optimizer.step_counter) == 5
    assert float(optimizer.loss_scale) == 2.0**14
    # As if the poisoned batch had not been there.
    reference = compiled(policy="float32")
    fit(reference, X[8:], Y[8:])
    assert_close(model.get_weights(), reference.get_weights())


NO_TARGET = np.full((8, 1), np.nan, "float32")


@pytest.mark.parametrize(
    ("optimizer", "x", "y"),
    [
        ("adam", POISONED[:8], Y[:8]),
        ("rmsprop", POISONED[:8], Y[:8]),
        ("sgd", X[:8], NO_TARGET),
    ],
    ids=["adam", "rmsprop", "poisoned target"],
)
def test_weights_and_slots_are_bit_for_bit_what_they_were_after_a_skip(optimizer, x, y):
    model = compiled(optimizer)
    fit(model)
    kept = [*model.trainable_variables, *model.optimizer.inner_optimizer.variables]
    before = values(kept)
    model.train_on_batch(x, y)
    assert int(model.optimizer.skipped_steps) == 1
    assert not bool(model.optimizer.last_step_finite)
    assert same_bits(before, values(kept))
    model.train_on_batch(X[:8], Y[:8])
    assert bool(model.optimizer.last_step_finite)
    assert not same_bits(before, values(kept))


@pytest.mark.parametrize("retake_steps", [0, 100])
def test_a_scale_that_is_too_large_backs_off_until_it_fits(retake_steps):
    optimizer = keras_mp.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), 2.0**24, retake_steps=retake_steps
    )
    fit(compiled(optimizer), epochs=4)
    assert int(optimizer.skipped_steps) > 0
    assert float(optimizer.loss_scale) == 2.0 ** (24 - int(optimizer.skipped_steps))
    lost = 0 if retake_steps else int(optimizer.skipped_steps)
    assert int(optimizer.iterations) == 24 - lost
    assert bool(optimizer.last_step_finite)


@ways
def test_max_consecutive_skips_stops_fit(how):
    optimizer = keras_mp.LossScaleOptimizer("sgd", max_consecutive_skips=3)
    model = compiled(optimizer, **how)
    with pytest.raises(keras_mp.TrainingDivergedError, match="steps in a row had grad"):
        fit(model, np.full_like(X, np.inf), epochs=4)
    assert 3 <= int(optimizer.consecutive_skips) < 24


def test_skips_that_are_not_in_a_row_stop_nothing():
    optimizer = keras_mp.LossScaleOptimizer("sgd", max_consecutive_skips=2)
    fit(compiled(optimizer), POISONED, epochs=3)
    assert int(optimizer.skipped_steps) == 3


def test_a_fit_that_diverged_can_go_on_with_better_data():
    optimizer = keras_mp.LossScaleOptimizer("sgd", max_consecutive_skips=2)
    model = compiled(optimizer)
    before = values(model.trainable_variables)
    with pytest.raises(keras_mp.TrainingDivergedError):
        fit(model, np.full_like(X, np.nan))
    assert same_bits(before, values(model.trainable_variables))
    fit(model)
    assert int(optimizer.iterations) == 6


# Train steps of the user's own ----------------------------------------------------


@pytest.mark.skipif(BACKEND != "tensorflow", reason="Keras builds it from the data")
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_train_step_may_call_the_model_with_something_else_than_its_data(policy):
    class Cropping(scaling_model()):
        def __init__(self):
            super().__init__()
            self.hidden, self.out = layers.Dense(4), layers.Dense(1)

        def call(self, x, training=False):
            return self.out(self.hidden(x))

        def train_step(self, *args):
            *state, (x, y) = args
            return super().train_step(*state, (x[:, :2], y))

    with keras_mp.policy_scope(policy):
        model = Cropping()
        model.compile("sgd", "mse")
        fit(model)
    assert tuple(model.hidden.kernel.shape) == (2, 4)
    assert hasattr(model.optimizer, "loss_scale") == (policy == "mixed_float16")


@ways
@pytest.mark.usefixtures("installed")
def test_layers_that_a_train_step_of_the_users_builds_late_are_scaled_too(how):
    class Lazy(scaling_model()):
        def build(self, shape):
            self.out = layers.Dense(1, dtype="mixed_float16")
            self.out.build(shape)
            self.built = True

        def call(self, x, training=False):
            return self.out(x)

    model = Lazy()
    model.compile(keras.optimizers.SGD(0.1), "mse", **how)
    fit(model)
    assert isinstance(model.optimizer, keras_mp.LossScaleOptimizer)
    losses = fit(model, epochs=3)
    assert losses[-1] < losses[0]
    assert int(model.optimizer.iterations) >= 18


@pytest.mark.filterwarnings("ignore:`build\\(\\)` was called:UserWarning")  # Keras'.
@ways
@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
@pytest.mark.sampled
def test_a_model_with_a_layer_that_it_never_calls_trains(policy, how):
    class Unused(keras.Model):
        def __init__(self):
            super().__init__()
            self.out, self.unused = layers.Dense(1), layers.Dense(1)

        def call(self, x):
            return self.out(x)

    keras.utils.set_random_seed(1)
    with keras_mp.policy_scope(policy):
        model = Unused()
    model.compile(keras.optimizers.SGD(0.1), "mse", **how)
    losses = fit(model, epochs=3)
    assert losses[-1] < 0.5 * losses[0] and not model.unused.built
    assert np.isfinite(model.evaluate(X, Y, verbose=0))
    assert model.predict(X, verbose=0).shape == (48, 1)


@pytest.mark.parametrize(
    "log", [lambda loss: {"loss": [loss, loss]}, lambda loss: {"loss": {"a": loss}},
            lambda loss: {"loss": 1.5}, lambda loss: {"mine": loss}],
    ids=["several losses", "a dict of losses", "a number", "no loss"],
)  # fmt: skip
def test_the_logs_of_a_train_step_may_be_anything(log):
    class Odd(scaling_model()):
        def train_step(self, *args):
            result = super().train_step(*args)
            if BACKEND == "jax":
                return log(result[0]["loss"]), result[1]
            return log(result["loss"])

    model = compiled("sgd", model_class=Odd)
    model.fit(POISONED, Y, batch_size=8, shuffle=False, verbose=0)
    assert int(model.optimizer.skipped_steps) == 1


def test_an_error_in_a_train_step_is_the_one_that_the_user_sees():
    keras_mp.set_global_policy("mixed_float16")

    class Wrong(keras.Sequential):
        def train_step(self, *args):
            raise ZeroDivisionError("the user's")

    model = Wrong([layers.Dense(2), layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ZeroDivisionError, match="the user's"):
        model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
