"""A kernel whose gradient half precision makes 0 is told, and no other one.

The table of what is silent: whatever keeps a kernel still in float32 as well.
"""

import re

import keras
import numpy as np
import pytest
from backends import BACKEND, values
from keras import layers, ops

import keras_mp
from keras_mp import still_kernels
from keras_mp.backends import engine

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(16, 8)).astype("float32")
Y = (X[:, :1] > 0).astype("float32")
# In float16 the squares of what it makes overflow: see `Normalize`.
LARGE = keras.initializers.RandomNormal(stddev=100.0, seed=1)


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(still_kernels, "STEPS", 4)


class Normalize(layers.Layer):
    """By hand: where the sum is infinite in float16, the result and its slope are 0."""

    def call(self, x):
        return x * ops.rsqrt(ops.sum(x * x, axis=-1, keepdims=True))


class Scaled(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = layers.Dense(32, kernel_initializer=LARGE, name="first")
        self.normalize, self.last = Normalize(), layers.Dense(1, name="last")

    def call(self, x):
        return self.last(self.normalize(self.first(x)))


def sequential():
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(32, kernel_initializer=LARGE, name="first"),
            Normalize(),
            layers.Dense(1, name="last"),
        ],
        name="model",
    )


def functional():
    inputs = keras.Input((8,))
    x = layers.Dense(32, kernel_initializer=LARGE, name="first")(inputs)
    return keras.Model(inputs, layers.Dense(1, name="last")(Normalize()(x)))


def made(build, policy="mixed_float16", optimizer=None, **options):
    keras.utils.set_random_seed(0)
    with keras_mp.policy_scope(policy):
        model = build()
    model.compile(optimizer or keras.optimizers.Adam(1e-3), "mse", **options)
    return model


def fit(model, epochs=3, y=Y):
    return model.fit(X, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0)


def messages(told):
    return [str(w.message) for w in told if "bit for bit" in str(w.message)]


SEVERAL = [1] if BACKEND == "torch" else [1, 3]  # Keras on torch takes one at a time.


@pytest.mark.parametrize(
    "options",
    [
        {"run_eagerly": True},
        {"jit_compile": False},
        *({"steps_per_execution": steps} for steps in SEVERAL),
    ],
    ids=str,
)
@pytest.mark.parametrize("build", [sequential, functional, Scaled])
@pytest.mark.sampled
def test_it_is_told_once_by_path_with_the_line_that_finds_the_layer(build, options):
    model = made(build, **options)
    with pytest.warns(UserWarning) as told:
        fit(model)
        fit(model)
    (message,) = messages(told)
    assert re.search(
        r"what they were when the training began: \S*first/kernel\. ", message
    )
    assert "are 0 in float16, but not in float32" in message
    assert message.endswith("print(keras_mp.diagnose(model, x, y))")
    found = keras_mp.diagnose(model, X, Y, verbose=0)
    assert any("normalize" in path for path in found.kept) and found.cured


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
def test_what_moves_is_not_told(policy, recwarn):
    fit(made(sequential, policy))
    assert not messages(recwarn)


def test_all_kernels_that_it_keeps_still_are_named():
    def build():
        model = sequential()
        model.pop()
        model.add(layers.Dense(4, "relu", name="second"))
        model.add(layers.Dense(1, name="last"))
        return model

    with pytest.warns(UserWarning) as told:
        fit(made(build))
    (message,) = messages(told)
    assert message.startswith("2 of 2 kernels")  # The second one's input is 0.
    assert "first/kernel, " in message and "second/kernel" in message


# What keeps a kernel still in float32, too -----------------------------------------


def plain(*more):
    return keras.Sequential(
        [keras.Input((8,)), layers.Dense(4, "relu"), *more, layers.Dense(1)]
    )


def frozen():
    model = plain()
    model.layers[0].trainable = False
    return model


def with_lora():
    model = plain()
    model.layers[0].enable_lora(2)
    return model


def dead_units():
    model = plain()
    model.layers[0].bias.assign(np.full(4, -100, "float32"))
    return model


def unused_branch():
    inputs = keras.Input((8,))
    used = layers.Dense(1, name="used")(layers.Dense(4)(inputs))
    unused = layers.Dense(1, name="unused")(layers.Dense(4)(inputs))
    return keras.Model(inputs, {"used": used, "unused": unused})


class Teacher(keras.Model):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = layers.Dense(1), layers.Dense(1)

    def call(self, x):
        return self.student(x) + ops.stop_gradient(self.teacher(x))


def accumulating():
    return keras.optimizers.SGD(0.1, gradient_accumulation_steps=64)


SILENT = {
    "moving": (plain, keras.optimizers.Adam),
    "frozen": (frozen, keras.optimizers.Adam),
    "lora": (with_lora, keras.optimizers.Adam),
    "dead units": (dead_units, keras.optimizers.Adam),
    "behind stop_gradient": (Teacher, keras.optimizers.Adam),
    "rate of 0": (plain, lambda: keras.optimizers.SGD(0.0)),
    "rate too small": (plain, lambda: keras.optimizers.SGD(1e-30)),
    "accumulation": (sequential, accumulating),
}


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "bfloat16"])
@pytest.mark.parametrize("kind", SILENT)
@pytest.mark.sampled
def test_what_is_still_in_float32_too_is_not_told(kind, policy, recwarn):
    build, optimizer = SILENT[kind]
    fit(made(build, policy, optimizer()))
    assert not messages(recwarn)


def test_a_kernel_that_no_loss_depends_on_is_not_told(recwarn):
    model = made(unused_branch)
    model.compile("adam", loss={"used": "mse"})
    fit(model, y={"used": Y})
    assert not messages(recwarn)


def test_nothing_is_said_before_anything_has_moved():
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([10], [0.0, 0.1])
    model = made(sequential, optimizer=keras.optimizers.SGD(rate))
    fit(model, epochs=2)
    with pytest.warns(UserWarning, match=r"first/kernel\. "):
        fit(model, epochs=3)


# What the look leaves alone --------------------------------------------------------


def stateful():
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(32, kernel_initializer=LARGE),
            Normalize(),
            layers.Dense(4),
            layers.BatchNormalization(),
            layers.Dropout(0.5, seed=3),
            layers.Dense(1),
        ]
    )


@pytest.mark.parametrize("steps", SEVERAL)
def test_a_look_changes_nothing(steps, monkeypatch):
    def train():
        model = made(stateful, steps_per_execution=steps, metrics=["mae"])
        history = fit(model).history
        return history, values([*model.variables, *model.metrics_variables])

    with pytest.warns(UserWarning, match="bit for bit"):
        history, after = train()
    monkeypatch.setattr(still_kernels, "STEPS", 10**6)
    expected, plainly = train()
    assert history == expected
    for value, wanted in zip(after, plainly, strict=True):
        np.testing.assert_array_equal(value, wanted)


def test_a_look_that_fails_ends_no_training(monkeypatch, recwarn):
    def out_of_memory(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(still_kernels, "gradients_of", out_of_memory)
    fit(made(sequential))
    assert not messages(recwarn)


def test_an_interrupted_look_leaves_the_model_its_values(monkeypatch):
    model = made(sequential)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(still_kernels, "gradients_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(model)
    assert int(model.optimizer.iterations) == 4
    assert np.isfinite(model.predict(X, verbose=0)).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (3,), (4, 3), (2, 3, 3, 2)])
def test_the_sums_see_one_bit(shape, dtype):
    value = ops.cast(ops.ones(shape), dtype)
    size = int(np.prod(shape))
    before = ops.convert_to_numpy(engine.sums_of_bits(value))
    again = ops.convert_to_numpy(engine.sums_of_bits(ops.copy(value)))
    np.testing.assert_array_equal(before, again)
    smallest = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    for index in {0, size // 2, size - 1}:
        changed = np.ones(size, "float32")
        changed[index] += smallest
        changed = ops.cast(ops.reshape(changed, shape), dtype)
        after = ops.convert_to_numpy(engine.sums_of_bits(changed))
        assert np.sum(before != after) == 1
        assert after.size == (shape[-1] if len(shape) > 1 else 1)
