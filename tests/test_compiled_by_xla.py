"""What XLA makes of TensorFlow's step with loss scaling: read, not timed."""

import re

import keras
import numpy as np
import pytest
from backends import BACKEND

import keras_mp

if BACKEND != "tensorflow":
    pytest.skip("The program of JAX: test_compiled_step.py", allow_module_level=True)

import tensorflow as tf

WIDTH = 64
KERNEL = f"{WIDTH},{WIDTH}"


def step(wrap, inner):
    """A step of a model with four kernels, for XLA, and the variables it writes."""
    model = keras.Sequential([keras.Input((WIDTH,))])
    for _ in range(4):
        model.add(keras.layers.Dense(WIDTH, activation="relu"))
    optimizer = wrap(inner)
    optimizer.build(model.trainable_variables)

    def apply(x):
        variables = model.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
            scaled = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled, variables), variables)

    written = [*model.trainable_variables, *optimizer.variables]
    return tf.function(apply, jit_compile=True), written


def program(wrap, inner):
    function, _ = step(wrap, inner)
    compile_program = function.experimental_get_compiler_ir(tf.ones((2, WIDTH)))
    text = compile_program(stage="optimized_hlo")
    return text[text.index("\nENTRY") :]


def count(text, shape, operation):
    return len(re.findall(rf"= {re.escape(shape)}\S* {operation}\(", text))


INNER = {
    "Adam": lambda: keras.optimizers.Adam(),
    "AdamW, averaged": lambda: keras.optimizers.AdamW(use_ema=True),
    "SGD with momentum": lambda: keras.optimizers.SGD(momentum=0.9),
}


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_there_is_no_conditional_and_no_more_copies_than_without_loss_scaling(inner):
    ours = program(keras_mp.LossScaleOptimizer, inner())
    base = program(lambda optimizer: optimizer, inner())
    assert "conditional(" not in ours
    kernel = f"f32[{KERNEL}]"
    assert count(ours, kernel, "copy") <= count(base, kernel, "copy")


def test_no_gradient_is_copied_to_be_looked_at():
    text = program(keras_mp.LossScaleOptimizer, keras.optimizers.Adam())
    assert count(text, f"f32[{KERNEL}]", "dot") == 4  # The gradients are of this shape.
    assert not re.search(rf"= s(32|8)\[(\d+,)?{KERNEL}\]", text)


def test_the_variables_write_as_ever_afterwards():
    function, written = step(keras_mp.LossScaleOptimizer, keras.optimizers.Adam())
    function(tf.ones((2, WIDTH)))
    assert not any(name.startswith("assign") for v in written for name in vars(v.value))
    written[0].assign(np.full((WIDTH, WIDTH), np.inf, "float32"))
    assert np.isinf(written[0].numpy()).all()


def test_so_they_do_after_an_error():
    class Broken(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            raise RuntimeError("broken")

    function, written = step(keras_mp.LossScaleOptimizer, Broken())
    with pytest.raises(RuntimeError, match="broken"):
        function(tf.ones((2, WIDTH)))
    assert not any(name.startswith("assign") for v in written for name in vars(v.value))


# What a select at each `assign` would miss --------------------------------------------


class Scattering(keras.optimizers.SGD):
    """Writes by another method than `assign`."""

    def update_step(self, gradient, variable, learning_rate):
        places = [[i] for i in range(gradient.shape[0])]
        variable.scatter_nd_sub(places, learning_rate * gradient)


class Nested(keras.optimizers.SGD):
    """Writes variables of which it says nothing."""

    def build(self, variables):
        super().build(variables)
        self.fast = keras.optimizers.Adam()
        self.fast.build(variables)

    def apply(self, grads, trainable_variables=None):
        self.fast.apply(grads, trainable_variables)

    @property
    def hidden(self):
        return self.fast.variables


class Noisy(keras.optimizers.SGD):
    """Draws random numbers."""

    def __init__(self):
        super().__init__()
        self.generator = keras.random.SeedGenerator(0)

    def update_step(self, gradient, variable, learning_rate):
        noise = keras.random.normal(gradient.shape, seed=self.generator)
        super().update_step(gradient + noise, variable, learning_rate)

    @property
    def hidden(self):
        return [self.generator.state]


class Counting(keras.constraints.Constraint):
    """A constraint with a state."""

    def __init__(self):
        self.calls = keras.Variable(0, dtype="int32", trainable=False)

    def __call__(self, w):
        self.calls.assign_add(1)
        return w


def applied(inner, variables, poisons):
    """Takes steps in one program; all that the optimizer may have written."""
    optimizer = keras_mp.LossScaleOptimizer(inner, 2.0, dynamic=False)
    optimizer.build(variables)

    @tf.function(jit_compile=True)
    def apply(gradient):
        optimizer.scale_loss(tf.constant(1.0))
        optimizer.apply([gradient for _ in variables], variables)

    for nonfinite_to_nan in poisons:
        apply(tf.fill((3,), nonfinite_to_nan))
    hidden = getattr(inner, "hidden", [])
    return [np.array(v) for v in (*variables, *inner.variables, *hidden)]


@pytest.mark.parametrize("make", [Scattering, Nested, Noisy])
@pytest.mark.filterwarnings("ignore:.*whatever the loss scale:UserWarning")
def test_a_skipped_step_of_an_optimizer_of_the_users_own_leaves_no_trace(make):
    def variables():
        return [keras.Variable(np.ones(3, "float32"))]

    after = applied(make(), variables(), [1.0, np.inf])
    for a, b in zip(after, applied(make(), variables(), [1.0]), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.filterwarnings("ignore:.*whatever the loss scale:UserWarning")
def test_nor_does_a_constraint_with_a_state():
    variable = keras.Variable(np.ones(3, "float32"))
    variable.constraint = constraint = Counting()
    applied(keras.optimizers.SGD(), [variable], [1.0, np.inf])
    assert int(constraint.calls.value) == 1


def test_variables_of_tensorflow_and_one_that_comes_twice():
    own = tf.Variable(tf.ones(3))
    applied(keras.optimizers.SGD(1.0), [own], [1.0])
    np.testing.assert_array_equal(own, np.full(3, 0.5, "float32"))
    twice = keras.Variable(np.ones(3, "float32"))
    applied(keras.optimizers.SGD(1.0), [twice, twice], [1.0])
    np.testing.assert_array_equal(twice, np.zeros(3, "float32"))


def test_fit_of_a_model_that_names_a_variable_twice():
    class Noise(keras.layers.Layer):
        def __init__(self, generator):
            super().__init__()
            self.generator = generator

        def call(self, x):
            return x + keras.random.normal(keras.ops.shape(x), seed=self.generator)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.generator = keras.random.SeedGenerator(1)
            self.noise, self.dense = Noise(self.generator), keras.layers.Dense(1)

        def call(self, x):
            return self.dense(self.noise(x))

    model = Model()
    optimizer = keras_mp.LossScaleOptimizer("sgd")
    model.compile(optimizer, "mse", jit_compile=True)
    model.fit(np.ones((8, 2), "float32"), np.ones((8, 1)), batch_size=4, verbose=0)
    assert optimizer.inner_optimizer.iterations == 2


def test_without_xla_a_gradient_may_be_of_unknown_rank():
    variable = keras.Variable(np.ones(3, "float32"))
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(1.0), 2.0)
    optimizer.build([variable])

    @tf.function
    def apply(number):
        optimizer.scale_loss(tf.constant(1.0))
        gradient = tf.numpy_function(lambda x: np.full(3, x), [number], tf.float32)
        optimizer.apply([gradient], [variable])

    apply(np.float32(np.inf))
    np.testing.assert_array_equal(variable, np.ones(3, "float32"))
    apply(np.float32(1.0))
    np.testing.assert_array_equal(variable, np.zeros(3, "float32"))
