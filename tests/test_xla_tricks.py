"""What is written for today's XLA: read from programs with it, and without.

Where a program without it is as good, the trick goes. `make tpu-gates` runs what is
for TPUs.
"""

import functools
import importlib
import re
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from keras import layers

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


def train_step(model, data, loss="mse"):
    """The compiled train step of a model on a batch."""
    from compiled_steps import build, step_of

    model.compile("adam", loss)
    build(model, data)
    model.make_train_function()
    return step_of(model, data)


def policy(**options):
    from compiled_steps import platform

    import keras_mp

    on_tpus = platform() == "tpu"
    kind = keras_mp.MixedBFloat16 if on_tpus else keras_mp.MixedFloat16
    return keras_mp.policy_scope(kind(**options))


CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def step_with_head(tokens=4096, width=1024, classes=32768, **options):
    """A step with a large head, whose loss is computed in chunks."""
    with policy(**options):
        ends = layers.Dense(width), layers.Dense(width), layers.Dense(classes)
        model = keras.Sequential([keras.Input((8,)), *ends])
    data = np.zeros((tokens, 8), "float32"), np.zeros(tokens, "int32")
    return train_step(model, data, CROSSENTROPY)


def step_with_ids(batch=8, length=512, width=768, classes=32768):
    with policy():
        ends = layers.Embedding(classes, width), layers.Dense(classes)
        model = keras.Sequential([keras.Input((length,), dtype="int32"), *ends])
    ids = np.zeros((batch, length), "int32")
    return train_step(model, (ids, ids), CROSSENTROPY)


def step_of_decoder():
    from whole_steps import whole_step

    make = whole_step.__wrapped__  # Not the step that is compiled already.
    return make("decoder", "mixed_float16", recompute_logits=True).program


def step_with_images(*stack, size=64, channels=64, batch=8):
    """A step with these layers on images."""
    end = layers.GlobalAveragePooling2D(), layers.Dense(1)
    model = keras.Sequential([keras.Input((size, size, channels)), *stack, *end])
    images = np.zeros((batch, size, size, channels), "float32")
    return train_step(model, (images, np.zeros((batch, 1), "float32")))


def step_with_convolutions(between=None, **options):
    with policy():
        stack = []
        for _ in range(4):
            stack.append(layers.Conv2D(64, 3, padding="same", **options))
            stack += between() if between else []
        return step_with_images(*stack)


def step_with_dense(activation, width=2048, batch=4096):
    with policy():
        hidden = [layers.Dense(width, activation=activation) for _ in range(4)]
        model = keras.Sequential([keras.Input((width,)), *hidden, layers.Dense(1)])
    data = np.zeros((batch, width), "float32"), np.zeros((batch, 1), "float32")
    return train_step(model, data)


def step_with_attention(width=256, length=512, batch=8):
    """Its dropout is what no fused kernel takes."""
    with policy():
        x = keras.Input((length, width))
        attention = layers.MultiHeadAttention(4, 64, dropout=0.1)
        model = keras.Model(x, layers.Dense(1)(attention(x, x)))
    data = np.zeros((batch, length, width), "float32")
    return train_step(model, (data, data[:, :, :1]))


def normalized():
    return [layers.GroupNormalization(8), layers.ReLU()]


def no_barrier():
    from jax import lax

    return SimpleNamespace(**{**vars(lax), "optimization_barrier": lambda x: x})


def no_barrier_of_pairs():
    from jax import lax

    def barrier(operands):
        return operands if len(operands) == 2 else lax.optimization_barrier(operands)

    return SimpleNamespace(**{**vars(lax), "optimization_barrier": barrier})


def no_slopes():
    return lambda function: function


def softmax_in_half():
    import jax

    return lambda axis, x: jax.nn.softmax(x, axis)


def moments_of_jax():
    import jax.numpy as jnp

    return lambda axes, x: [f(x, axes, keepdims=True) for f in (jnp.mean, jnp.var)]


def two_passes():
    from keras_mp.repairs.jax import one_pass

    return one_pass._in_two_passes


def gathered():
    from keras_mp.repairs.jax import one_pass

    return one_pass._gathered


RECOMPUTED = functools.partial(step_with_head, classes=131072, recompute_logits=True)
WITH_RELU = functools.partial(step_with_convolutions, activation="relu")
# For each trick: a step, where it is, what stands in its place, and what it saves.
ON_GPUS = {
    "logits of one chunk": (
        step_with_head,
        "kernels.jax.rows.lax",
        no_barrier,
        "temporary",
    ),
    "logits computed twice": (
        RECOMPUTED,
        "kernels.jax.chunks.lax",
        no_barrier,
        "temporary",
    ),
    "parts of a kernel": (
        *(step_of_decoder, "kernels.jax.chunks.lax", no_barrier_of_pairs, "temporary"),
    ),
    "one reduction": (
        step_with_head,
        "repairs.jax.one_pass._in_one_pass",
        two_passes,
        "accessed",
    ),
    "result of a relu": (
        WITH_RELU,
        "kernels.jax.activations.lax",
        no_barrier,
        "temporary",
    ),
    "moments": (
        functools.partial(step_with_convolutions, normalized),
        *("kernels.jax.moments._mean_and_variance", moments_of_jax, "accessed"),
    ),
    **{
        f"slopes of {name}": (
            functools.partial(step_with_dense, name),
            *("kernels.jax.activations._with_slopes", no_slopes, "temporary"),
        )
        for name in ("gelu", "selu")
    },
    "softmax": (
        step_with_attention,
        "repairs.jax.softmax._softmax",
        softmax_in_half,
        "accessed",
    ),
}
ON_TPUS = {
    "logits of labels": (
        step_with_ids,
        "repairs.jax.one_pass._summed",
        gathered,
        "accessed",
    ),
}
TRICKS = [
    pytest.param(*trick, marks=only_on(device), id=f"{name}, {device}")
    for device, tricks in (("gpu", ON_GPUS), ("tpu", ON_TPUS))
    for name, trick in tricks.items()
]


@pytest.mark.skipif(BACKEND != "jax", reason="of JAX")
def test_each_trick_is_where_it_is_looked_for():
    for _, place, _, _ in [*ON_GPUS.values(), *ON_TPUS.values()]:
        module, name = f"keras_mp.{place}".rsplit(".", 1)
        assert hasattr(importlib.import_module(module), name), place


@pytest.mark.parametrize("make, place, other, measure", TRICKS)
def test_without_it_a_step_needs_more_bytes(make, place, other, measure, monkeypatch):
    with_it = getattr(make(), measure)
    monkeypatch.setattr(f"keras_mp.{place}", other())
    assert getattr(make(), measure) >= 1.03 * with_it, NOT_NEEDED


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
