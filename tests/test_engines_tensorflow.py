"""Loss scaling under tf.distribute: all replicas skip, or none."""

import contextlib
import functools
import json

import keras
import numpy as np
import processes
import pytest
from backends import BACKEND, same_bits
from step_sequences import SEQUENCES

import keras_mp
from keras_mp.backends import engine
from keras_mp.backends.interface import Engine
from keras_mp.loss_scaling import summary

if BACKEND != "tensorflow":
    pytest.skip("tf.distribute is TensorFlow's", allow_module_level=True)

import engine_tensorflow
import tensorflow as tf
from engine_tensorflow import local_values, mirrored, trace

# What is told of them is tested in test_skip_watch.py.
pytestmark = pytest.mark.filterwarnings("ignore:.*whatever the loss scale:UserWarning")

# A loop of one's own -------------------------------------------------------------

GRAPH = [name for name in SEQUENCES if "accumulated" not in name]
CASES = [
    *((name, 2, "compiled") for name in GRAPH),
    ("inf", 4, "compiled"),
    ("broken on the first replica", 4, "compiled"),
    ("sparse", 4, "compiled"),
    ("clipped by value", 4, "compiled"),
    ("nan", 2, "eager"),
    ("sparse", 2, "eager"),
    ("accumulated", 2, "eager"),
]


@pytest.mark.parametrize("name, replicas, mode", CASES)
def test_every_replica_follows_the_oracle_to_the_bit(name, replicas, mode):
    sequence = SEQUENCES[name]
    traces = trace(mirrored(replicas), sequence, mode == "compiled")
    assert traces == [sequence.expected()] * replicas


def test_keras_own_wrapper_writes_the_infinity_of_another_replica_into_the_weights():
    strategy = mirrored(2)
    with strategy.scope():
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))
        weight = keras.Variable(np.ones(1, "float32"))
        optimizer.build([weight])

    def step():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        grad = tf.where(tf.equal(replica, 1), [np.float32("inf")], [1.0])
        optimizer.apply([grad], [weight])

    tf.function(lambda: strategy.run(step))()
    assert not np.isfinite(weight.numpy()).any()


@pytest.fixture(scope="module")
def workers():
    """What two processes print that train together: a dict each."""
    return processes.run("engine_tensorflow.py", processes=2)


@pytest.mark.parametrize("mode", engine_tensorflow.WORKERS)
@pytest.mark.slow("Several processes; those of one process stay.")
def test_every_process_follows_the_oracle_to_the_bit(mode, workers):
    for name in engine_tensorflow.WORKERS[mode]:
        expected = json.loads(json.dumps(SEQUENCES[name].expected()))
        for traces in workers:
            assert traces[f"{mode}: {name}"] == expected, name


def variable_and_optimizer(strategy, inner=keras.optimizers.SGD, **kwargs):
    with strategy.scope():
        variable = keras.Variable([[1.0, 2.0], [3.0, 4.0]])
        optimizer = keras_mp.LossScaleOptimizer(inner(), initial_scale=8.0, **kwargs)
        optimizer.build([variable])
    optimizer.scale_loss(1.0)
    return variable, optimizer


def in_a_graph(strategy, optimizer, grad, variable, **options):
    """A step in which each replica applies the same gradient."""
    return tf.function(
        lambda: strategy.run(lambda: optimizer.apply([grad], [variable])),
        autograph=False,
        **options,
    )


def test_sparse_gradients_reach_the_inner_optimizer_sparse():
    seen = []

    class Watching(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            seen.append(type(gradient))
            super().update_step(gradient, variable, learning_rate)

    strategy = mirrored(2)
    variable, optimizer = variable_and_optimizer(strategy, Watching)
    sparse = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([1]), tf.constant([2, 2]))
    in_a_graph(strategy, optimizer, sparse, variable)()
    assert set(seen) == {tf.IndexedSlices}


@pytest.mark.parametrize("compiled", [True, False])
def test_the_moving_average_of_weights_stands_still_in_a_skipped_step(compiled):
    strategy = mirrored(2)
    variable, optimizer = variable_and_optimizer(
        strategy, lambda: keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5)
    )
    state = [variable, *optimizer.inner_optimizer.variables]

    def step(grad):
        strategy.run(lambda: optimizer.apply([grad], [variable]))

    if compiled:
        step = tf.function(step, autograph=False)
    states = []
    for value in (1.0, float("inf"), 1.0):
        step(tf.fill((2, 2), value))
        states.append(local_values(strategy, state))
        assert same_bits(*states[-1])  # The two replicas.
    assert same_bits(states[0][1], states[1][1])
    assert not same_bits(states[1][1], states[2][1])


def test_skips_in_a_row_end_an_eager_loop():
    strategy = mirrored(2)
    variable, optimizer = variable_and_optimizer(strategy, max_consecutive_skips=2)

    grads = [tf.fill((2, 2), float("nan"))]
    strategy.run(lambda: optimizer.apply(grads, [variable]))
    with pytest.raises(keras_mp.errors.TrainingDivergedError, match="2 steps in a row"):
        strategy.run(lambda: optimizer.apply(grads, [variable]))


# What cannot be ------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [True, False])
def test_applied_outside_of_run_the_error_names_run(compiled):
    strategy = mirrored(2)
    variable, optimizer = variable_and_optimizer(strategy)
    step = lambda: optimizer.apply([tf.ones((2, 2))], [variable])  # noqa: E731
    if compiled:
        step = tf.function(step, autograph=False)
    with strategy.scope(), pytest.raises(ValueError, match=r"within `strategy\.run`"):
        step()


@pytest.mark.parametrize(
    "created, momentum, built",
    [("outside", 0.5, True), ("outside", 0.5, False), ("within", 0.0, True)],
)
def test_an_optimizer_created_or_built_out_of_scope_is_refused(
    created, momentum, built
):
    # Each replica would move its one scale and its one set of slots.
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0])
    with strategy.scope() if created == "within" else contextlib.nullcontext():
        optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(0.01, momentum))
    if built:
        optimizer.build([variable])
    optimizer.scale_loss(1.0)
    with pytest.raises(ValueError, match=r"created, and built, within `strategy\.sco"):
        strategy.run(lambda: optimizer.apply([tf.ones(2)], [variable]))


def test_an_optimizer_that_a_compiled_step_would_build_is_refused():
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0])
        optimizer = keras_mp.LossScaleOptimizer("sgd")
    optimizer.scale_loss(1.0)
    step = in_a_graph(strategy, optimizer, tf.ones(2), variable)
    with pytest.raises(ValueError, match="must be built before"):
        step()


def test_tensorflow_compiles_no_mirrored_variable_of_cpus_with_xla():
    # So gradients may be XLA's, and `apply` stands outside of them.
    strategy = mirrored(2)
    variable, optimizer = variable_and_optimizer(strategy)
    grad = tf.ones((2, 2))
    step = in_a_graph(strategy, optimizer, grad, variable, jit_compile=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="different_device"):
        step()


@pytest.mark.parametrize("wrap", [lambda o: o, keras_mp.LossScaleOptimizer])
def test_tensorflow_accumulates_no_gradients_in_a_compiled_step(wrap):
    # Keras branches on each replica, with or without us.
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0])
        optimizer = wrap(keras.optimizers.SGD(gradient_accumulation_steps=2))
        optimizer.build([variable])
    optimizer.scale_loss(1.0)
    step = in_a_graph(strategy, optimizer, tf.ones(2), variable)
    with pytest.raises(RuntimeError, match="merge_call"):
        step()


# fit -----------------------------------------------------------------------------

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 4)).astype("float32")
Y = (X[:, :1] * 2 - X[:, 1:2]).astype("float32")
BATCH = 8
FIT_MODES = {"compiled": {}, "eager": dict(run_eagerly=True)}


def fitted_model(
    strategy, scale=256.0, max_consecutive_skips=None, retake_steps=0, **kwargs
):
    keras.utils.set_random_seed(0)
    with keras_mp.policy_scope("mixed_float16"), strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(8, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
        optimizer = keras_mp.LossScaleOptimizer(
            keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9),
            initial_scale=scale,  # At 256 nothing overflows by itself.
            max_consecutive_skips=max_consecutive_skips,
            retake_steps=retake_steps,
        )
        model.compile(optimizer, "mse", metrics=["mae"], **kwargs)
    return model


def poisoned(at, sample):
    """The data, with a batch put in before each index of `at`, one sample of it inf."""
    xs, ys = [], []
    for index in range(len(X) // BATCH):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        if index in at:
            bad = X[rows].copy()
            bad[sample] = np.inf
            xs.append(bad)
            ys.append(Y[rows])
        xs.append(X[rows])
        ys.append(Y[rows])
    return np.concatenate(xs), np.concatenate(ys)


@functools.cache
def trained(replicas, at, sample=0, mode="compiled"):
    """A model, its history, and its variables on each replica."""
    strategy = mirrored(replicas)
    model = fitted_model(strategy, **FIT_MODES[mode])
    x, y = poisoned(at, sample)
    history = model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False)
    variables = model.variables + model.optimizer.inner_optimizer.variables
    return model, history.history, local_values(strategy, variables)


def scaling_states(model, strategy=None):
    strategy = strategy or model.distribute_strategy
    return [
        [v.item() for v in state]
        for state in local_values(strategy, model.optimizer._loss_scaling.variables)
    ]


# The samples of a batch are dealt out in order: the first replica has the first.
@pytest.mark.parametrize(
    "replicas, at, sample, mode",
    [
        *((2, (0, 2), sample, mode) for sample in (0, BATCH - 1) for mode in FIT_MODES),
        (4, (1,), BATCH - 1, "compiled"),
    ],
)
def test_in_fit_a_sample_poisoned_on_one_replica_leaves_no_trace_on_any(
    replicas, at, sample, mode
):
    _, clean_history, clean = trained(replicas, (), mode=mode)
    model, history, skipped = trained(replicas, at, sample, mode)
    for clean_replica, replica in zip(clean, skipped, strict=True):
        assert same_bits(clean_replica, replica)
    assert history == clean_history
    # The loss was broken on one replica: the scale stays on all.
    assert scaling_states(model) == [[256.0, 4, len(at), 0, len(at)]] * replicas


def test_in_fit_batch_logs_show_no_skipped_step():
    seen = []
    model = fitted_model(mirrored(2))
    x, y = poisoned((1, 3), BATCH - 1)
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(
            {name: float(value) for name, value in logs.items()}
        )
    )
    model.fit(x, y, BATCH, callbacks=[callback], shuffle=False, verbose=0)
    assert all(np.isfinite(value) for logs in seen for value in logs.values())
    assert seen[1] == seen[0]  # The skipped step, and the one before.
    assert seen[4] == seen[3]


def test_in_fit_an_overflow_backs_off_once_for_all_replicas():
    model = fitted_model(mirrored(2), scale=2.0**24)
    model.train_on_batch(X[:BATCH], Y[:BATCH])
    assert scaling_states(model) == [[2.0**23, 0, 1, 1, 0]] * 2


@pytest.mark.parametrize("retake_steps", [0, 100])
def test_in_fit_the_overflow_of_the_default_scale_passes(retake_steps):
    model = fitted_model(mirrored(2), scale=2.0**15, retake_steps=retake_steps)
    big = np.tile(Y * 1000, (4, 1))
    history = model.fit(np.tile(X, (4, 1)), big, batch_size=BATCH, verbose=0)
    (first, second) = scaling_states(model)
    scale, _, skipped, _, broken = first
    assert first == second
    assert skipped > 0 and scale == 2.0 ** (15 - skipped) and broken == 0
    lost = 0 if retake_steps else skipped
    assert model.optimizer.iterations.numpy() == 16 - lost > 0
    assert np.isfinite(history.history["loss"]).all()


def test_in_fit_skips_in_a_row_raise_on_the_last_replica_too():
    model = fitted_model(mirrored(2), max_consecutive_skips=2)
    bad = X.copy()
    bad[BATCH - 1 :: BATCH] = np.nan
    with pytest.raises(keras_mp.errors.TrainingDivergedError, match="in a row"):
        model.fit(bad, Y, batch_size=BATCH, verbose=0, shuffle=False)


def test_what_users_read_of_a_mirrored_optimizer_are_numbers(monkeypatch):
    monkeypatch.setattr(summary, "_entries", {})
    optimizer = trained(2, (0, 2))[0].optimizer
    summary.note(optimizer)
    (line,) = summary.lines()
    assert line.endswith(": loss scale 256, 4 steps, 2 skipped")
    assert float(optimizer.loss_scale) == 256.0
    assert int(optimizer.skipped_steps) == 2
    assert int(optimizer.consecutive_skips) == 0
    assert bool(optimizer.last_step_finite)
    reports = optimizer.nonfinite_report()
    assert {line.count for line in reports} == {2}  # Steps, not replicas.


@pytest.mark.usefixtures("installed")
def test_a_model_whose_layers_are_known_late_gets_its_wrapper_within_the_scope():
    class Late(keras.Model):
        def build(self, input_shape):
            self.dense = keras.layers.Dense(1, dtype="mixed_float16")
            self.dense.build(input_shape)

        def call(self, x):
            return self.dense(x)

    with mirrored(2).scope():
        model = Late()
        model.compile("adam", "mse")
    assert not isinstance(model.optimizer, keras_mp.LossScaleOptimizer)
    x, y = poisoned((0, 2), BATCH - 1)
    model.fit(x / 100, y, batch_size=BATCH, verbose=0, shuffle=False)
    assert scaling_states(model) == [[2.0**15, 4, 2, 0, 2]] * 2


@pytest.mark.parametrize("reader", ["one device", "two replicas"])
def test_what_was_saved_under_a_strategy_trains_on(reader, tmp_path):
    model, _, _ = trained(2, (0, 2), BATCH - 1)
    model.save(tmp_path / "model.keras")
    strategy = mirrored(2) if reader == "two replicas" else tf.distribute.get_strategy()
    with strategy.scope():
        again = keras.models.load_model(tmp_path / "model.keras")
    assert scaling_states(again, strategy)[-1] == [256.0, 4, 2, 0, 2]
    for before, after in [
        (model.weights, again.weights),
        (model.optimizer.variables, again.optimizer.variables),
    ]:
        # The first replica's: Keras keeps BatchNormalization's statistics apart.
        here = local_values(model.distribute_strategy, before)[0]
        assert all(same_bits(here, there) for there in local_values(strategy, after))
    again.fit(*poisoned((0,), BATCH - 1), batch_size=BATCH, verbose=0)
    assert scaling_states(again, strategy)[-1] == [256.0, 8, 3, 0, 3]


# AutoGraph -----------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in vars(Engine) if not n.startswith("_")])
def test_autograph_can_convert_what_a_compiled_loop_calls(name):
    # What it cannot, it runs as it is, with a warning to the user.
    if callable(getattr(engine, name)):
        tf.autograph.to_graph(getattr(engine, name))


@pytest.mark.parametrize("aggregation", ["sum", "mean", "only_first_replica"])
def test_in_fit_what_a_layer_holds_is_no_replicas_sum(aggregation):
    class Holding(keras.layers.Dense):
        def build(self, shape):
            super().build(shape)
            self.held = self.add_weight(
                shape=(), initializer="ones", trainable=False, aggregation=aggregation
            )

    strategy = mirrored(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), Holding(1, dtype="mixed_float16")])
        model.compile(keras_mp.LossScaleOptimizer("sgd"), "mse")
    x = np.ones((12, 2), "float32")
    x[4] = np.inf
    model.fit(x, np.ones((12, 1)), batch_size=4, shuffle=False, verbose=0)
    assert int(model.optimizer.skipped_steps) == 1
    assert local_values(strategy, [model.layers[0].held]) == [[1.0], [1.0]]
