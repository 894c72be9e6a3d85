"""What a user does with keras_mp, in twenty short tests.

`make test-versions` runs this file on each set of versions in sets.toml. It asks for
what an old or a new Keras, JAX, TensorFlow or torch may break, and is quick enough to
run on all of them; the other tests go deeper.
"""

import keras
import numpy as np
import pytest
from backends import BACKEND, gradients, same_bits, values

import keras_mp

layers = keras.layers

RNG = np.random.default_rng(0)
X = RNG.normal(scale=0.5, size=(32, 3)).astype("float32")
Y = X @ np.array([[0.5], [-0.5], [0.25]], "float32") + 0.1
# tanh makes the infinity 1: the loss is finite, and the kernel's gradient is not.
OVERFLOW = X.copy()
OVERFLOW[:, 0] = np.inf


def regression(policy="mixed_float16"):
    keras.utils.set_random_seed(1)
    with keras_mp.policy_scope(policy):
        return keras.Sequential(
            [keras.Input((3,)), layers.Dense(8, activation="tanh"), layers.Dense(1)]
        )


def compiled(policy="mixed_float16", **how):
    model = regression(policy)
    model.compile(keras.optimizers.Adam(0.01), "mse", **how)
    return model


def fit(model, x=X, callbacks=(), **how):
    how = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0, **how}
    return model.fit(x, Y, callbacks=list(callbacks), **how).history


def loop(optimizer):
    """One variable, and a step of a loop as a user writes it."""
    weight = keras.Variable(np.array([4.0], "float32"))

    def step(unscale=False, factor=1.0):
        def loss():
            return keras.ops.sum(keras.ops.square(weight)) * factor

        grads = gradients(lambda: optimizer.scale_loss(loss()), [weight])
        if unscale:
            grads = optimizer.unscale(grads)
        optimizer.apply(grads, [weight])
        return float(values([weight])[0][0])

    return step


# Policies -------------------------------------------------------------------------


def test_policy_scope_ends():
    with keras_mp.policy_scope("mixed_float16"):
        assert layers.Dense(2).compute_dtype == "float16"
    assert layers.Dense(2).compute_dtype == "float32"
    assert keras_mp.recommended_policy().name


def test_products_are_float16_and_softmax_and_output_float32():
    with keras_mp.policy_scope("mixed_float16"):
        inputs = keras.Input((4,))
        hidden = layers.Dense(4, activation="relu", name="hidden")
        softmax = layers.Dense(3, activation="softmax", name="softmax")
        model = keras.Model(inputs, softmax(hidden(inputs)))
    assert (hidden.compute_dtype, hidden.variable_dtype) == ("float16", "float32")
    assert softmax.compute_dtype == "float32"
    y = model(np.ones((2, 4), "float32"))
    assert keras.backend.standardize_dtype(y.dtype) == "float32"


def test_an_adaptive_pooling_model_trains():
    pool = getattr(layers, "AdaptiveAveragePooling2D", None)
    if pool is None:
        pytest.skip(f"Keras {keras.__version__} has no AdaptiveAveragePooling2D")
    with keras_mp.policy_scope("mixed_float16"):
        model = keras.Sequential(
            [
                keras.Input((8, 8, 2)),
                layers.Conv2D(4, 3),
                pool((2, 2)),
                layers.Flatten(),
            ]
        )
        model.add(layers.Dense(1))
    assert model.layers[1].compute_dtype == "float32"
    model.compile("sgd", "mse")
    history = model.fit(np.ones((4, 8, 8, 2)), np.ones((4, 1)), verbose=0).history
    assert np.isfinite(history["loss"]).all()


def test_a_convolution_with_normalization_and_attention_trains_under_bfloat16():
    with keras_mp.policy_scope("mixed_bfloat16"):
        inputs = keras.Input((6, 4))
        x = layers.BatchNormalization()(layers.Conv1D(4, 3, padding="same")(inputs))
        x = layers.MultiHeadAttention(2, 2)(x, x)
        model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(x)))
    model.compile("adam", "mse")
    history = model.fit(np.ones((4, 6, 4)), np.ones((4, 1)), verbose=0).history
    assert np.isfinite(history["loss"]).all()
    assert not hasattr(model.optimizer, "dynamic_scale")  # bfloat16 needs no scale.


# fit --------------------------------------------------------------------------------


HOW = [{}, {"run_eagerly": True}, {"steps_per_execution": 2}]
if BACKEND == "torch":
    HOW = [{}]


@pytest.mark.parametrize("how", HOW, ids=str)
def test_fit_learns_and_the_loss_scale_grows(how):
    model = regression()
    scaled = keras_mp.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=2.0**10, dynamic_growth_steps=4
    )
    model.compile(scaled, "mse", **how)
    loss = fit(model)["loss"]
    assert loss[-1] < loss[0]
    assert float(scaled.loss_scale) == 2.0**12
    assert int(scaled.skipped_steps) == 0


def test_compile_scales_the_optimizer_of_a_float16_model_alone():
    assert isinstance(compiled().optimizer, keras_mp.LossScaleOptimizer)
    assert isinstance(compiled("float32").optimizer, keras.optimizers.Adam)


@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_skipped_step_never_happened(how):
    model = compiled(**how)
    fit(model)
    inner = model.optimizer.inner_optimizer
    before = values([*model.variables, *inner.variables])
    scale = float(model.optimizer.loss_scale)
    fit(model, OVERFLOW, epochs=1)
    assert same_bits(before, values([*model.variables, *inner.variables]))
    assert int(model.optimizer.skipped_steps) == 4
    assert float(model.optimizer.loss_scale) == scale / 2**4
    fit(model, epochs=1)
    assert not same_bits(before, values([*model.variables, *inner.variables]))


def test_batch_statistics_are_put_back_after_a_skipped_step():
    with keras_mp.policy_scope("mixed_float16"):
        model = keras.Sequential(
            [keras.Input((3,)), layers.Dense(4), layers.BatchNormalization()]
        )
        model.add(layers.Dense(1))
    model.compile("sgd", "mse")
    before = values(model.variables)
    with pytest.warns(UserWarning, match="4 of 4 steps were skipped"):
        fit(model, np.full_like(X, np.nan), epochs=1)
    assert same_bits(before, values(model.variables))


def test_a_scaled_optimizer_of_keras_own_stays_as_it_is():
    model = regression()
    own = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    model.compile(own, "mse")
    assert model.optimizer is own


def test_a_run_that_only_skips_can_be_stopped():
    model = regression()
    stops = keras_mp.LossScaleOptimizer("sgd", max_consecutive_skips=3)
    model.compile(stops, "mse")
    with pytest.raises(keras_mp.TrainingDivergedError):
        fit(model, OVERFLOW, epochs=4)


# Loops of the user's own ------------------------------------------------------------


@pytest.mark.parametrize("unscale", [False, True])
def test_a_loop_scales_applies_and_skips(unscale):
    optimizer = keras_mp.LossScaleOptimizer(
        keras.optimizers.SGD(0.25), initial_scale=8.0, dynamic_growth_steps=2
    )
    step = loop(optimizer)
    assert step(unscale) == 2.0 and step(unscale) == 1.0  # Its gradient is 2 w.
    assert float(optimizer.loss_scale) == 16.0
    assert step(unscale, factor=np.float32(np.inf)) == 1.0
    assert float(optimizer.loss_scale) == 8.0
    assert not bool(optimizer.last_step_finite)
    assert step(unscale) == 0.5


@pytest.mark.skipif(BACKEND != "jax", reason="stateless loops are JAX's")
def test_a_stateless_loop_on_jax_scales_applies_and_skips():
    import jax

    optimizer = keras_mp.LossScaleOptimizer(
        keras.optimizers.SGD(0.25), initial_scale=8.0, dynamic_growth_steps=2
    )
    weight = keras.Variable(np.array([4.0], "float32"))
    optimizer.build([weight])

    @jax.jit
    def step(weights, state, factor):
        def loss(weights):
            value = keras.ops.sum(keras.ops.square(weights[0])) * factor
            return optimizer.stateless_scale_loss(state, value)

        return optimizer.stateless_apply(state, jax.grad(loss)(weights), weights)

    weights, state = [weight.value], [v.value for v in optimizer.variables]
    for factor, expected in [(1.0, 2.0), (1.0, 1.0), (np.inf, 1.0), (1.0, 0.5)]:
        weights, state = step(weights, state, np.float32(factor))
        assert float(weights[0][0]) == expected
    for variable, value in zip(optimizer.variables, state, strict=True):
        variable.assign(value)
    assert int(optimizer.skipped_steps) == 1
    assert float(optimizer.loss_scale) == 8.0


# Models that exist already ----------------------------------------------------------


def test_convert_goes_there_and_back():
    model = regression("float32")
    weights, expected = model.get_weights(), model.predict(X, verbose=0)
    keras_mp.convert(model, "mixed_float16")
    assert model.layers[0].compute_dtype == "float16"
    np.testing.assert_allclose(model.predict(X, verbose=0), expected, atol=1e-2)
    keras_mp.convert(model, "float32")
    assert same_bits(weights, model.get_weights())
    np.testing.assert_array_equal(model.predict(X, verbose=0), expected)


def test_a_saved_model_goes_on_with_its_loss_scale(tmp_path):
    model = compiled()
    fit(model, OVERFLOW, epochs=1)
    fit(model, epochs=1)
    path = str(tmp_path / "model.keras")
    model.save(path)
    reopened = keras.models.load_model(path)
    assert isinstance(reopened.optimizer, keras_mp.LossScaleOptimizer)
    assert reopened.layers[0].compute_dtype == "float16"
    assert float(reopened.optimizer.loss_scale) == float(model.optimizer.loss_scale)
    np.testing.assert_array_equal(
        reopened.predict(X, verbose=0), model.predict(X, verbose=0)
    )
    fit(reopened, epochs=1)
    fit(model, epochs=1)
    assert same_bits(reopened.get_weights(), model.get_weights())


# Seeing what precision does ---------------------------------------------------------


def test_inspect_names_every_layer():
    model = compiled()
    shown = str(keras_mp.inspect(model))
    assert all(layer.name in shown for layer in model.layers)


@keras.saving.register_keras_serializable(package="versions")
class Loud(layers.Layer):
    """Passes 65504 on the way to a small result."""

    def call(self, x):
        return x * 1e4 * 1e4 * 1e-4 * 1e-4


def overflowing():
    keras.utils.set_random_seed(0)
    with keras_mp.policy_scope("mixed_float16"):
        model = keras.Sequential([keras.Input((3,)), layers.Dense(4, name="quiet")])
        model.add(Loud(name="loud"))
        model.add(layers.Dense(1))
    model.compile("sgd", "mse")
    return model


def test_diagnose_finds_an_overflow_and_leaves_the_model_alone():
    model = overflowing()
    before = values(model.variables)
    shown = str(keras_mp.diagnose(model, X, Y))
    assert "loud" in shown
    assert same_bits(before, values(model.variables))


def test_find_float32_layers_finds_what_overflows():
    found = keras_mp.find_float32_layers(overflowing(), (X, Y))
    assert [path.split("/")[-1] for path in found.paths] == ["loud"]


def test_compare_trains_under_both_policies():
    def build():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(4)])
        model.add(layers.Dense(1))
        model.compile("sgd", "mse")
        return model

    shown = str(
        keras_mp.compare(
            build, (X, Y), (X, Y), ["float32", "mixed_float16"], seeds=2, verbose=0
        )
    )
    assert "float32" in shown and "mixed_float16" in shown


def test_loss_scale_monitor_writes_into_the_logs():
    model = compiled()
    history = fit(model, callbacks=[keras_mp.callbacks.LossScaleMonitor()])
    assert history["loss_scale"][-1] == float(model.optimizer.loss_scale)
    assert history["skipped_steps"][-1] == 0
