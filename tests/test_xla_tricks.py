"""What is written for today's XLA: read from programs with it, and without.

Where a program without it is as good, the trick goes. `make tpu-gates` runs what is
for TPUs.
"""

import re
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from keras_mp.backends import reductions

BACKEND = keras.backend.backend()
if BACKEND == "torch":
    pytest.skip("XLA compiles for JAX and TensorFlow", allow_module_level=True)

WIDTH = 256
NOT_NEEDED = "this trick is not needed any more: remove it"


def only_on(platform):
    """Marks the test of a trick that JAX needs on CPUs, or on TPUs."""
    if BACKEND == "jax":
        from compiled_steps import platform as there

        return pytest.mark.skipif(there() != platform, reason=f"for a {platform}")
    return pytest.mark.skip(reason="of JAX")


def check_of(number, width=WIDTH):
    """The compiled check of so many gradients, each the product of two matrices."""
    import jax
    import jax.numpy as jnp
    from compiled_steps import compiled

    from keras_mp.backends.jax import step

    def check(matrices, inverse_scale):
        grads = [jnp.matmul(x, x) for x in matrices]
        codes = step.nonfinite(grads)
        return codes, step.unscale(grads, inverse_scale)

    matrices = [np.zeros((width, width), "float32")] * number
    return compiled(jax.jit(check), (matrices, np.float32(1)), matrices)


def words(program):
    """How many words of 32 bits for each place of a gradient are written."""
    entry = program.text[program.text.index("\nENTRY") :]
    return len(re.findall(rf"= s32\[{WIDTH},{WIDTH}\]\S* fusion\(", entry))


@only_on("cpu")
def test_a_remainder_keeps_a_word_from_being_computed_for_each_gradient(monkeypatch):
    from keras_mp.backends.jax import step

    assert words(check_of(20)) == 2
    monkeypatch.setattr(step.lax, "rem", lambda word, largest: word)
    # Now the kernel that reads a word 15 times computes it 15 times.
    assert words(check_of(20)) == 0, NOT_NEEDED


@only_on("cpu")
def test_a_few_large_gradients_are_read_without_words(monkeypatch):
    from keras_mp.backends.jax import step

    number = step.FEW - 4
    alone = check_of(number)
    monkeypatch.setattr(step, "FEW", 0)
    shared = check_of(number)
    # A word is written and read.
    assert shared.accessed >= alone.accessed + 1.9 * 4 * WIDTH**2, NOT_NEEDED


def unsplit(shape, first):
    return None


@only_on("cpu")
def test_an_axis_in_two_parts_is_reduced_without_a_copy(monkeypatch):
    number, size = 20, 4 * WIDTH**2
    parts = check_of(number)
    monkeypatch.setattr(reductions, "split_axis", unsplit)
    # The codes of each element are written and read.
    whole = check_of(number)
    assert whole.accessed >= parts.accessed + number * size // 4, NOT_NEEDED


@only_on("cpu")
def test_a_mask_takes_the_sign_of_a_nan_where_an_abs_would_be_left_out(monkeypatch):
    import jax
    from jax import lax

    from keras_mp.backends.jax import step
    from keras_mp.backends.step import NAN

    def code_of_square(x):
        return jax.jit(lambda x: step.nonfinite([x * x]))(x)[0]

    negative_nan = np.array([0xFFC00000], "uint32").view("float32")
    assert code_of_square(negative_nan) == NAN
    monkeypatch.setattr(
        step, "_bits", lambda x, _: lax.bitcast_convert_type(lax.abs(x), "int32")
    )
    assert code_of_square(negative_nan) != NAN, NOT_NEEDED


@only_on("tpu")
def test_a_maximum_of_floats_keeps_a_tpu_from_writing_bits(monkeypatch):
    from keras_mp.backends.jax import step

    number, width = 4, 4096
    floats = check_of(number, width)
    monkeypatch.setattr(step, "_code_of_largest", step._code_of)
    bits = check_of(number, width)
    assert bits.accessed >= 1.03 * floats.accessed, NOT_NEEDED


def bytes_of_head(tokens=4096, width=1024, classes=32768):
    """The bytes that a step takes with a head and its loss in chunks of the rows."""
    from compiled_steps import build, step_of

    import keras_mp

    with keras_mp.policy_scope("mixed_float16"):
        x, head = keras.layers.Dense(width), keras.layers.Dense(classes)
        model = keras.Sequential(
            [keras.Input((8,)), x, keras.layers.Dense(width), head]
        )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    data = np.zeros((tokens, 8), "float32"), np.zeros(tokens, "int32")
    build(model, data)
    model.make_train_function()
    return step_of(model, data).temporary


def without_barriers():
    from jax import lax

    return SimpleNamespace(**{**vars(lax), "optimization_barrier": lambda x: x})


@only_on("gpu")
def test_a_barrier_keeps_the_logits_of_one_chunk_alone(monkeypatch):
    from keras_mp.backends.jax import rows

    with_it = bytes_of_head()
    monkeypatch.setattr(rows, "lax", without_barriers())
    assert bytes_of_head() >= 1.03 * with_it, NOT_NEEDED


def bytes_of_convolutions(number=4, channels=64, size=128, batch=8):
    """The bytes that a step takes with convolutions that end in a ReLU."""
    from compiled_steps import build, step_of

    import keras_mp

    def convolution():
        return keras.layers.Conv2D(channels, 3, padding="same", activation="relu")

    with keras_mp.policy_scope("mixed_float16"):
        stack = [convolution() for _ in range(number)]
        end = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((size, size, 3)), *stack, *end])
    model.compile("adam", "mse")
    data = np.zeros((batch, size, size, 3), "float32"), np.zeros((batch, 1), "float32")
    build(model, data)
    model.make_train_function()
    return step_of(model, data).temporary


@only_on("gpu")
def test_a_barrier_keeps_the_result_of_a_relu_alone(monkeypatch):
    from keras_mp.backends.jax import convolutions

    with_it = bytes_of_convolutions()
    monkeypatch.setattr(convolutions, "lax", without_barriers())
    assert bytes_of_convolutions() >= 1.2 * with_it, NOT_NEEDED


@pytest.mark.skipif(BACKEND != "tensorflow", reason="of TensorFlow")
def test_on_tensorflow_too_an_axis_in_two_parts_is_reduced_without_a_copy(monkeypatch):
    assert not copies()
    monkeypatch.setattr(reductions, "split_axis", unsplit)
    assert copies(), NOT_NEEDED


def copies():
    """The copies of gradients that TensorFlow's check writes."""
    import tensorflow as tf

    from keras_mp.backends.tensorflow import step

    def check(x):
        grads = [x @ x for _ in range(2)]
        return step.nonfinite(grads), grads

    function = tf.function(check, jit_compile=True)
    read = function.experimental_get_compiler_ir(tf.ones((WIDTH, WIDTH)))
    entry = read(stage="optimized_hlo").partition("\nENTRY")[2]
    return re.findall(rf"= s8\[(?:\d+,)?{WIDTH},{WIDTH}\]", entry)
