"""StochasticRoundingOptimizer: bfloat16 weights that train as float32 ones do."""

import functools
import warnings

import keras
import numpy as np
import pytest
from backends import BACKEND, COMPILED, same_bits, stateful_step, values
from keras import layers, optimizers

import keras_mp
from keras_mp import StochasticRoundingOptimizer

GENERATOR = np.random.default_rng(0)
X = GENERATOR.standard_normal((512, 16)).astype("float32")
Y = (X @ GENERATOR.standard_normal((16, 4))).argmax(1)


def multi_optimizer():
    return optimizers.MultiOptimizer(
        lambda v: optimizers.Adam(1e-3) if "kernel" in v.path else optimizers.SGD(0.01)
    )


OPTIMIZERS = {
    "Adadelta": lambda: optimizers.Adadelta(1.0),
    "Adafactor": lambda: optimizers.Adafactor(1e-3),
    "Adagrad": lambda: optimizers.Adagrad(1e-2),
    "Adam": lambda: optimizers.Adam(1e-3),
    "Adam, small steps": lambda: optimizers.Adam(2e-5),
    "Adamax": lambda: optimizers.Adamax(1e-3),
    "AdamW": lambda: optimizers.AdamW(1e-3, weight_decay=0.1),
    "amsgrad": lambda: optimizers.Adam(1e-3, amsgrad=True),
    "accumulation": lambda: optimizers.Adam(1e-3, gradient_accumulation_steps=2),
    "averages": lambda: optimizers.Adam(1e-3, use_ema=True),
    "clipnorm": lambda: optimizers.Adam(1e-3, clipnorm=0.1),
    "global_clipnorm": lambda: optimizers.Adam(1e-3, global_clipnorm=0.1),
    "Lamb": lambda: optimizers.Lamb(1e-3),
    "Lion": lambda: optimizers.Lion(1e-4),
    "Nadam": lambda: optimizers.Nadam(1e-3),
    "RMSprop": lambda: optimizers.RMSprop(1e-3),
    "SGD": lambda: optimizers.SGD(0.01),
    "SGD with momentum": lambda: optimizers.SGD(0.01, momentum=0.9),
}
if hasattr(optimizers, "MultiOptimizer"):
    OPTIMIZERS["MultiOptimizer"] = multi_optimizer
for name in ("Ftrl", "Muon", "ScheduleFreeAdamW"):
    if hasattr(optimizers, name):
        OPTIMIZERS[name] = functools.partial(getattr(optimizers, name), 1e-3)


def model_of(dtype):
    """The same weights in both dtypes: numbers that bfloat16 holds."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((16,)),
            layers.Dense(32, activation="relu", dtype=dtype),
            layers.Dense(4, dtype="float32", name="head"),
        ]
    )
    generator = np.random.default_rng(1)
    for variable in model.variables:
        value = generator.uniform(-0.3, 0.3, variable.shape)
        variable.assign(
            keras.ops.cast(keras.ops.cast(value, "bfloat16"), variable.dtype)
        )
    return model


def losses_of(model, optimizer, epochs=4):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    options = dict(batch_size=32, epochs=epochs, verbose=0, shuffle=False)
    return model.fit(X, Y, **options).history["loss"]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.sampled
def test_the_loss_is_that_of_float32(name):
    expected = losses_of(model_of("float32"), OPTIMIZERS[name]())
    model = model_of("bfloat16")
    found = losses_of(model, StochasticRoundingOptimizer(OPTIMIZERS[name](), seed=1))
    # Beside what the loss has come down.
    np.testing.assert_allclose(found, expected, rtol=0.02)
    assert model.layers[0].kernel.dtype == "bfloat16"
    kept = [v for v in model.optimizer.variables if v.shape == (16, 32)]
    assert all(v.dtype == "bfloat16" for v in kept)


@pytest.mark.filterwarnings("ignore:Optimizer")
def test_without_it_adam_does_not_train():
    first, *_, last = losses_of(model_of("bfloat16"), optimizers.Adam(1e-3))
    trained = losses_of(
        model_of("bfloat16"), StochasticRoundingOptimizer(optimizers.Adam(1e-3), seed=1)
    )
    assert first - last < 0.5 * (trained[0] - trained[-1])


# Single updates ---------------------------------------------------------------------

SHAPES = [(64, 8), (8,), ()]


def variables_of(dtype="bfloat16"):
    return [keras.Variable(np.ones(s, "float32"), dtype=dtype) for s in SHAPES]


def gradients_of(value, dtype="bfloat16"):
    return [keras.ops.cast(np.full(s, value, "float32"), dtype) for s in SHAPES]


@pytest.mark.parametrize("compiled", COMPILED)
def test_updates_below_half_of_the_last_bit_are_made_now_and_then(compiled):
    optimizer = StochasticRoundingOptimizer(optimizers.SGD(2.0**-11), seed=3)
    variables = variables_of()
    optimizer.build(variables)
    step = stateful_step(optimizer, variables, compiled)
    for _ in range(200):
        step(gradients_of(1.0))
    weights = np.concatenate([v.astype("float32").ravel() for v in values(variables)])
    # To nearest, none of them would move.
    lost = 1 - weights
    error = 2.0**-8 * np.sqrt(200 * 0.25 / len(weights))
    assert abs(lost.mean() - 200 * 2.0**-11) < 5 * error
    assert len(np.unique(weights)) > 10


@pytest.mark.parametrize("compiled", COMPILED)
def test_the_seed_decides(compiled):
    def run(seed):
        adam = optimizers.AdamW(1e-3, weight_decay=0.01)
        optimizer = StochasticRoundingOptimizer(adam, seed=seed)
        variables = variables_of()
        if compiled:
            optimizer.build(variables)
        step = stateful_step(optimizer, variables, compiled)
        for index in range(5):
            step(gradients_of(0.5 + index))
        return values(variables), values(optimizer.variables)

    first, again, other = map(run, (1, 1, 2))
    assert same_bits(first[0], again[0]) and same_bits(first[1], again[1])
    assert not same_bits(first[0][:1], other[0][:1])


def test_a_seed_is_drawn_that_keras_random_seed_decides():
    seeds = []
    for _ in range(2):
        keras.utils.set_random_seed(5)
        seeds += values(StochasticRoundingOptimizer("sgd").variables[:1])
    other = values(StochasticRoundingOptimizer("sgd").variables[:1])
    assert seeds[0] == seeds[1] != other[0]


def test_a_model_file_goes_on_to_the_bit(tmp_path):
    keras.config.set_dtype_policy("bfloat16")
    model = model_of("bfloat16")
    losses_of(model, StochasticRoundingOptimizer("adam"), epochs=1)
    path = tmp_path / "model.keras"
    model.save(path)
    again = keras.saving.load_model(path)
    assert again.layers[0].kernel.dtype == "bfloat16"
    assert isinstance(again.optimizer, StochasticRoundingOptimizer)
    for each in (model, again):
        each.fit(X, Y, batch_size=32, verbose=0, shuffle=False)
    assert same_bits(values(model.variables), values(again.variables))
    assert same_bits(
        values(model.optimizer.variables), values(again.optimizer.variables)
    )


@pytest.mark.parametrize("compiled", COMPILED)
def test_within_loss_scaling_a_skipped_step_never_happened(compiled):
    def training(overflows):
        optimizer = keras_mp.LossScaleOptimizer(
            StochasticRoundingOptimizer(optimizers.Adam(1e-2), seed=1),
            initial_scale=8.0,
            backoff_factor=0.5,
        )
        optimizer.scale_loss(1.0)
        variables = variables_of()
        optimizer.build(variables)
        step = stateful_step(optimizer, variables, compiled)
        for index in range(4):
            if overflows and index == 2:
                step([np.full(s, np.inf, "float32") for s in SHAPES])
            scale = float(optimizer.loss_scale)
            step([np.full(s, scale * index, "float32") for s in SHAPES])
        return optimizer, values(variables + optimizer.inner_optimizer.variables)

    (skipped, found), (_, expected) = training(True), training(False)
    assert int(skipped.skipped_steps) == 1
    assert same_bits(found, expected)


# Slots of float32 weights -----------------------------------------------------------


def test_slots_of_float32_weights_in_bfloat16():
    expected = losses_of(model_of("float32"), optimizers.Adam(1e-3))
    model = model_of("float32")
    optimizer = StochasticRoundingOptimizer(
        optimizers.Adam(1e-3), slot_dtype="bfloat16", seed=1
    )
    np.testing.assert_allclose(losses_of(model, optimizer), expected, rtol=0.02)
    assert {v.dtype for v in model.trainable_variables} == {"float32"}
    slots = [v for v in optimizer.variables if v.shape == (16, 32)]
    assert [v.dtype for v in slots] == ["bfloat16", "bfloat16"]


def test_float32_weights_are_updated_as_ever():
    expected = losses_of(model_of("float32"), optimizers.Adam(1e-3), epochs=1)
    model = model_of("float32")
    found = losses_of(model, StochasticRoundingOptimizer(optimizers.Adam(1e-3)), 1)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


# What can go wrong ------------------------------------------------------------------


def test_after_an_error_everything_is_as_it_was():
    class Fails(optimizers.Adam):
        def update_step(self, *args):
            super().update_step(*args)
            raise RuntimeError("in the middle")

    optimizer, variables = StochasticRoundingOptimizer(Fails()), variables_of()
    optimizer.build(variables)
    before = set(vars(optimizer.inner_optimizer))
    with pytest.raises(RuntimeError, match="in the middle"):
        optimizer.apply(gradients_of(1.0), variables)
    assert {v.dtype for v in variables} == {"bfloat16"}
    assert set(vars(optimizer.inner_optimizer)) == before
    assert keras.ops.convert_to_numpy(variables[0]).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inner_optimizer": "adam", "slot_dtype": "float16"}, "slot_dtype='float16'"),
        ({"inner_optimizer": "adam", "seed": -1}, "seed=-1"),
        ({"inner_optimizer": "adam", "seed": 1.5}, "seed=1.5"),
        ({"inner_optimizer": "adam", "seed": True}, "seed=True"),
        ({"inner_optimizer": 3}, "optimizer identifier: 3"),
        *(
            ({"inner_optimizer": wrapper("sgd")}, "goes outside")
            for wrapper in (keras_mp.LossScaleOptimizer, StochasticRoundingOptimizer)
        ),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        StochasticRoundingOptimizer(**arguments)


def test_its_config_makes_it_again():
    optimizer = StochasticRoundingOptimizer(
        optimizers.Adam(0.5), slot_dtype="bfloat16", name="rounds"
    )
    again = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(optimizer)
    )
    assert again.get_config() == optimizer.get_config()
    assert float(again.learning_rate) == 0.5
    again.learning_rate = 0.25
    assert float(again.inner_optimizer.learning_rate) == 0.25


@pytest.mark.skipif(BACKEND != "tensorflow", reason="strategies of TensorFlow")
def test_replicas_are_refused(monkeypatch):
    import tensorflow as tf

    optimizer, variables = StochasticRoundingOptimizer("sgd"), variables_of()
    optimizer.build(variables)
    strategy = type("Strategy", (), {"num_replicas_in_sync": 2})
    monkeypatch.setattr(tf.distribute, "get_strategy", strategy)
    with pytest.raises(ValueError, match="strategy of 2 replicas"):
        optimizer.apply(gradients_of(1.0), variables)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow has sparse gradients")
def test_a_sparse_gradient_is_as_a_dense_one():
    import tensorflow as tf

    found = []
    for sparse in (True, False):
        variable = keras.Variable(np.ones((6, 3), "float32"), dtype="bfloat16")
        grad = tf.IndexedSlices(tf.ones((2, 3), "bfloat16"), [1, 4], (6, 3))
        optimizer = StochasticRoundingOptimizer(optimizers.Adam(0.1), seed=1)
        grad = grad if sparse else tf.convert_to_tensor(grad)
        optimizer.apply([grad], [variable])
        found.append(values([variable]))
    assert same_bits(*found)


@pytest.mark.skipif(BACKEND != "torch", reason="processes with variables of their own")
def test_all_processes_of_torch_round_alike(monkeypatch):
    import torch

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(
        torch.distributed, "broadcast", lambda seed, source: seed.fill_(7 + source)
    )
    optimizer = StochasticRoundingOptimizer("sgd", seed=1)
    optimizer.build(variables_of())
    assert int(optimizer.variables[0]) == 7


# An optimizer that is lost in bfloat16 ----------------------------------------------


def warnings_of(optimizer, dtype="bfloat16"):
    variables = variables_of(dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.apply(gradients_of(1.0, dtype), variables)
    return [str(w.message) for w in caught if "bfloat16 weights" in str(w.message)]


@pytest.mark.parametrize(
    "optimizer, lost",
    [
        (optimizers.Adam(), "beta_2=0.999 is 1 in bfloat16"),
        (optimizers.Adam(beta_2=0.99), "less than 1/512 of its weight is lost"),
        (optimizers.SGD(0.01), "less than 1/512 of its weight is lost"),
        (optimizers.Lion(), "less than 1/512 of its weight is lost"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_it_is_said_once_what_is_lost(optimizer, lost):
    (message,) = warnings_of(optimizer)
    assert lost in message
    assert "keras_mp.StochasticRoundingOptimizer(optimizer)" in message


@pytest.mark.parametrize("weight", [1.0, 1.5, 1.99, 300.0, 1e-3])
@pytest.mark.usefixtures("installed")
def test_the_update_that_is_lost_is_lost(weight):
    """What is said of it: less than 1/512 of the weight never moves it."""
    variable = keras.Variable([weight], dtype="bfloat16")
    (before,) = values([variable])
    sgd = optimizers.SGD(1.0)
    with pytest.warns(UserWarning, match="1/512"):
        for _ in range(100):
            sgd.apply([keras.ops.cast([weight * 0.99 / 512], "bfloat16")], [variable])
    np.testing.assert_array_equal(*values([variable]), before)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda: StochasticRoundingOptimizer("adam"), "bfloat16"),
        (lambda: StochasticRoundingOptimizer("sgd"), "bfloat16"),
        (lambda: optimizers.Adam(), "float32"),
    ],
)
def test_where_nothing_is_lost_nothing_is_said(make, dtype):
    assert not warnings_of(make(), dtype)


@pytest.mark.usefixtures("installed")
def test_fit_tells_of_it_too():
    with pytest.warns(UserWarning, match="StochasticRoundingOptimizer"):
        losses_of(model_of("bfloat16"), optimizers.AdamW(), epochs=1)
