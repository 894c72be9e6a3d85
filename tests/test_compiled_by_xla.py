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
