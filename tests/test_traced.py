"""`jit_compile=True` on torch: a step that was traced computes what the eager one does.

Bit for bit: the same operators run in the same order, without Keras' Python.
"""

import threading
import warnings

import keras
import numpy as np
import pytest
from backends import BACKEND, same_bits, values
from keras import layers, ops

import keras_mp
from keras_mp.traced.function import TracedFunction
from sweeps.layer_cases import cases
from sweeps.layer_fit import OneLayer, fits

if BACKEND != "torch":
    pytest.skip("it is torch whose steps are traced", allow_module_level=True)

import torch
from half_products_torch import use_kernel

from keras_mp.backends.torch.traces import Trace
from keras_mp.kernels.torch import cross_entropy
from keras_mp.policies import weights

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 6)).astype("float32")
TOKENS = RNG.integers(0, 5, (8, 6))
IMAGES = RNG.normal(size=(8, 8, 8, 3)).astype("float32")
Y = RNG.integers(0, 4, 8)
BAD = np.where(np.arange(8)[:, None] == 3, np.inf, X).astype("float32")
POLICIES = ["float32", "mixed_float16", "mixed_bfloat16"]
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.fixture(params=POLICIES)
def policy(request):
    keras_mp.set_global_policy(request.param)
    keras_mp.install()  # Under float32 nobody else asks.
    return request.param


def batches(x, count=5):
    """Each is another, of arrays of the same shapes."""
    return [(np.roll(x, i, 1), np.roll(Y, i)) for i in range(count)]


def dense(**options):
    return [layers.Dense(8, activation="relu"), layers.Dense(4, **options)]


def sequential(*inside, x=X):
    return keras.Sequential([keras.Input(x.shape[1:], dtype=x.dtype), *inside])


def frozen():
    inside = dense()
    inside[0].trainable = False
    return sequential(*inside)


def tied():
    table = layers.ReversibleEmbedding(5, 4, tie_weights=True)
    inputs = keras.Input((6,), dtype="int64")
    x = layers.Dense(4)(table(inputs))
    return keras.Model(inputs, ops.mean(table(x, reverse=True), axis=1))


def attention():
    inputs = keras.Input((6,), dtype="int64")
    x = layers.Embedding(5, 8)(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    return keras.Model(inputs, layers.Dense(4)(layers.Flatten()(x)))


class Subclassed(keras.Model):
    """It adds a loss, which each call makes anew."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = (
            layers.Dense(8, kernel_regularizer="l2"),
            layers.Dense(4),
        )

    def call(self, x, training=False):
        x = self.inner(x)
        self.add_loss(1e-2 * ops.mean(ops.square(x)))
        return self.head(x)


class Counting(layers.Layer):
    """A layer with state of its own, in its own dtype."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        return x


MODELS = {
    "dense": (lambda: sequential(*dense()), X),
    "softmax head": (lambda: sequential(*dense(activation="softmax")), X),
    "batch normalization": (
        lambda: sequential(layers.Dense(8), layers.BatchNormalization(), *dense()),
        X,
    ),
    "dropout": (lambda: sequential(layers.Dense(8), layers.Dropout(0.5), *dense()), X),
    "convolutions": (
        lambda: sequential(
            layers.Conv2D(8, 3),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(4),
            x=IMAGES,
        ),
        IMAGES,
    ),
    "LSTM": (
        lambda: sequential(layers.Embedding(5, 4), layers.LSTM(4), *dense(), x=TOKENS),
        TOKENS,
    ),
    "attention": (attention, TOKENS),
    "tied weights": (tied, TOKENS),
    "frozen weights": (frozen, X),
    "subclassed": (Subclassed, X),
    "state": (lambda: sequential(layers.Dense(8), Counting(), *dense()), X),
}


def optimizer_of(policy, **options):
    inner = options.pop("inner", keras.optimizers.Adam(1e-2))
    if policy != "mixed_float16":
        return inner
    given = {"retake_steps": 0, "initial_scale": 8.0, **options}
    return keras_mp.LossScaleOptimizer(inner, **given)


def programs_of(model, function="train_function"):
    """The trace of a function, or None."""
    step = getattr(model, function)
    while not isinstance(getattr(step, "__self__", None), TracedFunction):
        step = step.__wrapped__
    return step.__self__._program


def trained(build, steps, optimizer, jit_compile, **compiled):
    """What a model's training leaves: its model, and what each step returned."""
    keras.utils.set_random_seed(0)
    model = build()
    given = {"loss": LOGITS, "metrics": ["accuracy"], **compiled}
    model.compile(optimizer(), **given, jit_compile=jit_compile)
    keras.utils.set_random_seed(1)
    return model, [model.train_on_batch(*step, return_dict=True) for step in steps]


def state_of(model):
    return values([*model.variables, *model.optimizer.variables])


def same(build, steps, optimizer, traced=True, **compiled):
    """A training, eager and traced: the same bits. Returns the traced model."""
    eager, logs = trained(build, steps, optimizer, False, **compiled)
    model, others = trained(build, steps, optimizer, True, **compiled)
    assert (programs_of(model) is not None) == traced
    np.testing.assert_equal(logs, others)
    assert same_bits(state_of(eager), state_of(model))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_a_traced_step_is_the_eager_one_bit_for_bit(name, policy):
    build, x = MODELS[name]
    if name == "softmax head":
        loss = keras.losses.SparseCategoricalCrossentropy()
    else:
        loss = LOGITS
    same(build, batches(x), lambda: optimizer_of(policy), loss=loss)


@pytest.mark.kernels
@pytest.mark.parametrize("metrics", [None, ["accuracy"]])
def test_a_large_head_and_its_loss_in_chunks(metrics, mixed_float16, monkeypatch):
    use_kernel(monkeypatch)
    monkeypatch.setattr(weights, "LARGE", 1)
    monkeypatch.setattr(cross_entropy, "_CHUNK", 8 * 2 * 4)
    numbers, original = [], cross_entropy.CrossEntropyInChunks.apply

    def apply(*args):
        numbers.append(args[-1])
        return original(*args)

    monkeypatch.setattr(cross_entropy.CrossEntropyInChunks, "apply", apply)
    build, x = MODELS["dense"]
    optimizer = lambda: optimizer_of("mixed_float16")  # noqa: E731
    same(build, batches(x), optimizer, metrics=metrics)
    assert numbers and min(numbers) > 1


OPTIMIZERS = {
    "a schedule": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.CosineDecay(1e-2, 10)
    ),
    "clipping": lambda: keras.optimizers.Adam(1e-2, global_clipnorm=0.1),
    "clipping by value": lambda: keras.optimizers.SGD(1e-2, clipvalue=0.01),
    "momentum": lambda: keras.optimizers.SGD(1e-2, momentum=0.9, nesterov=True),
    "weight decay": lambda: keras.optimizers.AdamW(1e-2, weight_decay=0.1),
    "averages": lambda: keras.optimizers.Adam(1e-2, use_ema=True),
    "amsgrad": lambda: keras.optimizers.Adam(1e-2, amsgrad=True),
    "RMSprop": lambda: keras.optimizers.RMSprop(1e-3),
    "Lion": lambda: keras.optimizers.Lion(1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, policy):
    build, x = MODELS["dense"]
    inner = OPTIMIZERS[name]
    same(build, batches(x), lambda: optimizer_of(policy, inner=inner()))


@pytest.mark.filterwarnings("ignore:3 of 10 steps were skipped")
def test_skipped_steps_and_a_growing_scale(mixed_float16):
    build, _ = MODELS["batch normalization"]
    inputs = [X, X, X, BAD, -X, 2 * X, BAD, BAD, X, -X, X]
    optimizer = lambda: optimizer_of("mixed_float16", dynamic_growth_steps=3)  # noqa: E731
    model = same(build, [(x, Y) for x in inputs], optimizer)
    assert int(model.optimizer.skipped_steps) == 3


def test_a_scale_that_is_too_high_is_lowered(mixed_float16):
    build, _ = MODELS["dense"]
    optimizer = lambda: optimizer_of("mixed_float16", initial_scale=2.0**20)  # noqa: E731
    model = same(build, [(30 * X, Y)] * 12, optimizer)
    assert 0 < int(model.optimizer.skipped_steps) < 12


def test_sample_weights_two_outputs_and_their_metrics(policy):
    def build():
        inputs = keras.Input((6,), name="x")
        x = layers.Dense(8, activation="relu")(inputs)
        outputs = {"a": layers.Dense(4, name="a")(x), "b": layers.Dense(1, name="b")(x)}
        return keras.Model({"x": inputs}, outputs)

    batch = {"x": X}, {"a": Y, "b": X[:, :1]}, {"a": X[:, 0] ** 2, "b": X[:, 1] ** 2}
    batch = keras.tree.map_structure(np.ascontiguousarray, batch)
    other = keras.tree.map_structure(lambda a: a[::-1].copy(), batch)
    same(
        build,
        [batch, other, batch, other],
        lambda: optimizer_of(policy),
        loss={"a": LOGITS, "b": "mse"},
        metrics={"a": ["accuracy"], "b": ["mae"]},
        weighted_metrics={"b": ["mse"]},
    )


def test_accumulation_stays_eager_and_says_so(policy):
    build, x = MODELS["dense"]
    inner = lambda: keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2)  # noqa: E731
    with pytest.warns(
        UserWarning,
        match=r"stays eager in spite of .*what it does depends on a value \(.*\.py:",
    ):
        same(
            build,
            batches(x),
            lambda: optimizer_of(policy, inner=inner()),
            traced=False,
        )


def test_fit_with_a_shorter_last_batch_is_the_eager_one(policy):
    histories = []
    for jit_compile in (False, True):
        keras.utils.set_random_seed(0)
        model = MODELS["batch normalization"][0]()
        model.compile(
            optimizer_of(policy), LOGITS, metrics=["accuracy"], jit_compile=jit_compile
        )
        x, y = np.tile(X, (5, 1))[:37], np.tile(Y, 5)[:37]
        fitted = model.fit(x, y, 8, 3, verbose=0, validation_data=(x, y))
        predicted = model.predict(x, 8, verbose=0)
        histories.append((fitted.history, predicted.tolist(), state_of(model)))
    (eager, first, before), (traced, second, after) = histories
    assert eager == traced and first == second and same_bits(before, after)
    for function in ("train_function", "test_function", "predict_function"):
        assert programs_of(model, function) is not None


CHANGES = "freeze", "rate", "beta", "set_weights", "convert", "optimizer"


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_steps_counts(change, mixed_float16):
    def after(model):
        if change == "freeze":
            model.layers[0].trainable = False
        elif change == "rate":
            model.optimizer.learning_rate = 0.1
        elif change == "beta":
            model.optimizer.inner_optimizer.beta_1 = 0.5
        elif change == "set_weights":
            model.set_weights([np.zeros_like(w) + 0.1 for w in model.get_weights()])
        elif change == "convert":
            keras_mp.convert(model, "float32")
        else:
            model.optimizer = keras_mp.LossScaleOptimizer("sgd")
            model.optimizer.build(model.trainable_variables)

    found = []
    for jit_compile in (False, True):
        model, _ = trained(
            MODELS["dense"][0],
            batches(X, 4),
            lambda: optimizer_of("mixed_float16"),
            jit_compile,
        )
        after(model)
        for step in batches(X):
            model.train_on_batch(*step)
        found.append(values(model.variables))
    assert same_bits(*found)


def test_an_interrupt_leaves_the_model_as_it_was(mixed_float16, monkeypatch):
    build, _ = MODELS["batch normalization"]
    model, _ = trained(
        build, batches(X, 4), lambda: optimizer_of("mixed_float16"), True
    )
    program, before = programs_of(model), state_of(model)
    run = program._forward._run

    def interrupted(*tensors):
        run(*tensors)
        raise KeyboardInterrupt

    monkeypatch.setattr(program._forward, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.train_on_batch(X, Y)
    assert same_bits(before, state_of(model))


def calls_of(step):
    """The operators that a step calls."""
    seen = []

    class Calls(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Calls():
        step()
    return seen


def normalized():
    inside = [layers.Dense(8), layers.BatchNormalization(), layers.Dense(8)]
    return sequential(*inside, layers.BatchNormalization(), *dense())


@pytest.mark.kernels
def test_the_flag_is_all_that_a_step_waits_for(mixed_float16):
    optimizer = lambda: optimizer_of("mixed_float16")  # noqa: E731
    model, _ = trained(normalized, batches(X, 4), optimizer, True)
    batch = torch.tensor(X), torch.tensor(Y), None  # As `train_on_batch` gives it.
    seen = calls_of(lambda: model.train_function([batch]))
    waits = ("_local_scalar_dense", "nonzero", "equal.default", "lift_fresh")
    assert len(seen) > 50
    assert len([name for name in seen if any(w in name for w in waits)]) == 1
    # All moving variances are multiplied at once, before and after their kernels.
    assert len([name for name in seen if "_foreach_mul_." in name]) == 2
    assert "aten.mul_.Tensor" not in seen


def test_an_error_of_a_replay_is_that_of_the_eager_step(policy):
    build, _ = MODELS["attention"]
    model, _ = trained(build, batches(TOKENS), lambda: optimizer_of(policy), True)
    before = state_of(model)
    with pytest.warns(UserWarning, match="stays eager"), pytest.raises(IndexError):
        model.train_on_batch(TOKENS + 5, Y)  # There are five tokens.
    assert same_bits(before, state_of(model))
    model.train_on_batch(TOKENS, Y)


def test_a_dropout_with_a_seed_draws_anew_in_each_step(mixed_float16):
    build = lambda: sequential(layers.Dropout(0.5, seed=1), *dense())  # noqa: E731
    with pytest.warns(UserWarning, match="stays eager"):
        same(build, [(X, Y)] * 5, lambda: optimizer_of("mixed_float16"), traced=False)


VIEWS = {
    "itself": lambda x: x,
    "a view": lambda x: x.t()[1:],
    "a part": lambda x: x.unbind()[0],
    "a part of a part": lambda x: x.split(1)[1].detach().view(-1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_what_a_trace_returns_is_not_in_the_memory_of_what_it_gets(name, installed):
    x = torch.arange(6.0).reshape(2, 3)
    (found,) = Trace(lambda x: [VIEWS[name](x)], [x])(x)
    assert torch.equal(found, VIEWS[name](x))
    x.zero_()
    assert found.count_nonzero() > 0


def test_threads_trace_at_the_same_time(mixed_float16):
    def run():
        optimizer = lambda: optimizer_of("mixed_float16")  # noqa: E731
        models.append(trained(MODELS["dense"][0], batches(X), optimizer, True)[0])

    models = []
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [programs_of(model) is not None for model in models] == [True] * 4


def test_a_hook_on_a_gradient_stays_eager_and_is_told(policy):
    model, _ = trained(MODELS["dense"][0], [(X, Y)], lambda: optimizer_of(policy), True)
    seen = []
    model.trainable_variables[0].value.register_hook(seen.append)
    with pytest.warns(UserWarning, match="a gradient has a hook"):
        for _ in range(3):
            model.train_on_batch(X, Y)
    assert len(seen) == 3 and programs_of(model) is None


def test_a_step_of_the_users_own_is_left_to_keras(policy):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = layers.Dense(4)

        def call(self, x):
            return self.head(x)

        def train_step(self, data):
            return super().train_step(data)

    model = Own()
    model.compile(optimizer_of(policy), LOGITS, jit_compile=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.make_train_function()
    with pytest.raises(AttributeError):
        programs_of(model)


def test_a_training_waits_for_the_steps_that_may_be_taken_again(mixed_float16):
    optimizer = lambda: optimizer_of("mixed_float16", retake_steps=3)  # noqa: E731
    model, _ = trained(MODELS["dense"][0], [(X, Y)] * 3, optimizer, True)
    assert programs_of(model) is None
    for _ in range(3):
        model.train_on_batch(X, Y)
    assert programs_of(model) is not None


# Each layer of the sweep that returns floats. What cannot be traced stays eager.
WHOLE = {"Discretization", "HashedCrossing", "Hashing", "IntegerLookup"}
LAYERS = [case for case in cases("torch") if fits(case) and case.cls not in WHOLE]


@pytest.mark.slow("Each class of layers of Keras.")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.name)
def test_every_layer(case, mixed_float16):
    x = keras.tree.flatten(case.inputs())
    y = np.zeros((len(x[0]), 1), "float32")
    found = []
    for jit_compile in (False, True):
        keras.utils.set_random_seed(0)
        model = OneLayer(case)
        optimizer = optimizer_of("mixed_float16", inner=keras.optimizers.SGD(1e-6))
        model.compile(optimizer, "mse", jit_compile=jit_compile)
        keras.utils.set_random_seed(1)
        # Another batch in each step, without a number that the first has not.
        steps = [[a[:: (-1) ** i].copy() for a in x] for i in range(4)]
        logs = [model.train_on_batch(each, y, return_dict=True) for each in steps]
        found.append((logs, state_of(model)))
    (eager, before), (traced, after) = found
    np.testing.assert_equal(eager, traced)
    assert same_bits(before, after)
