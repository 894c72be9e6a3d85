"""A large head and its cross-entropy in chunks of rows, as TensorFlow's XLA has them.

On a GPU alone; here XLA compiles them for a CPU.
"""

import gc
import re
import weakref

import keras
import numpy as np
import pytest
from allpairspy import AllPairs
from backends import BACKEND

if BACKEND != "tensorflow":
    pytest.skip("chunks of TensorFlow", allow_module_level=True)

import tensorflow as tf
from keras import layers, ops
from products import counted, in_hlo

import keras_mp
from keras_mp.backends.tensorflow import private
from keras_mp.kernels import logits, products
from keras_mp.kernels.logits import Product
from keras_mp.kernels.tensorflow import cross_entropy, rows
from keras_mp.policies import weights
from keras_mp.repairs.logits import known, note
from keras_mp.repairs.products import HalfOperands

pytestmark = [pytest.mark.usefixtures("installed"), pytest.mark.kernels]

EXAMPLES, LENGTH, CLASSES, WIDTH = 10, 6, 300, 16
RANDOM = np.random.default_rng(0)
IDS = RANDOM.integers(0, CLASSES, (EXAMPLES, LENGTH))
LABELS = RANDOM.integers(0, CLASSES, (EXAMPLES, LENGTH))


@pytest.fixture(autouse=True)
def every_head_is_large(monkeypatch):
    monkeypatch.setattr(weights, "LARGE", 1)
    monkeypatch.setattr(products, "ONE_CHUNK", 2**11)
    monkeypatch.setattr(cross_entropy, "ROWS", 8)


@pytest.fixture
def on_gpu(monkeypatch):
    """Traces as for a GPU. Only there XLA has memory without values."""

    def choose(is_there):
        monkeypatch.setattr(private, "is_for_gpu", lambda: is_there)

    monkeypatch.setattr(private, "empty", tf.zeros)
    choose(True)
    return choose


@pytest.fixture
def made(monkeypatch):
    """The numbers of chunks of each loss that was traced in chunks."""
    numbers = []

    def losses(head, number, targets, whole):
        numbers.append(number)
        return original(head, number, targets, whole)

    original = rows.losses
    monkeypatch.setattr(rows, "losses", losses)
    return numbers


# Losses and gradients, one by one ---------------------------------------------------

SOME = RANDOM.integers(0, CLASSES, (4, 6))
SOME[0, 0] = 7
INPUTS = RANDOM.normal(size=(4, 6, WIDTH)).astype("float32")
KERNEL = RANDOM.normal(size=(WIDTH, CLASSES)).astype("float32")
BIAS = RANDOM.normal(size=(CLASSES,)).astype("float32")
VALID = SOME[..., None] != 7
# What a head does to its product, and a loss to the logits.
STEPS = {
    "nothing": lambda x, bias: x,
    "bias": ops.add,
    "bias and cap": lambda x, bias: ops.multiply(
        ops.tanh(ops.divide(ops.add(x, bias), 5.0)), 5.0
    ),
    "temperature": lambda x, bias: ops.divide(x, 0.05),
    "ignored": lambda x, bias: ops.where(VALID, x, 0),
}
HALVES = {
    "float16": ("float16", "float16"),
    "not scaled": ("float16", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
}
SHAPES = {"known": (4, 6, WIDTH), "unknown": (None, 6, WIDTH)}
ONE_HOT = (SOME[..., None] == np.arange(CLASSES)).astype("float32")
TARGETS = {"labels": SOME, "probabilities": 0.8 * ONE_HOT + 0.2 / CLASSES}
TABLE = [[*STEPS], [*HALVES], [2, 3, 5], [*SHAPES], [*TARGETS], *[[0, 1]] * 2]


@pytest.mark.parametrize("case", [*AllPairs(TABLE)], ids=lambda case: f"{case}")
def test_losses_and_gradients_are_those_of_logits_as_a_whole(
    case, on_gpu, made, monkeypatch
):
    step, half, number, shape, kind, tied, classes = case
    operands = HalfOperands(*HALVES[half], bool(tied), "in chunks", bool(classes))
    monkeypatch.setattr(cross_entropy, "number_of_chunks", lambda *_: number)
    # Its steps read the batch, which is known where they do.
    shape = (4, 6, WIDTH) if step == "ignored" else SHAPES[shape]
    targets = tf.constant(TARGETS[kind])
    upstream = RANDOM.uniform(0.5, 1.5, (4, 6)).astype("float32")
    name = f"{'sparse_' * (kind == 'labels')}categorical_crossentropy"

    @tf.function(
        jit_compile=True,
        input_signature=[
            *(tf.TensorSpec(s) for s in (shape, KERNEL.shape, BIAS.shape))
        ],
    )
    def run(inputs, kernel, bias):
        with tf.GradientTape() as tape:
            tape.watch([inputs, kernel, bias])
            flat = tf.reshape(inputs, (-1, WIDTH))
            product = rows.half_product(flat, kernel, operands)
            shaped = tf.reshape(product, (*ops.shape(inputs)[:2], CLASSES))
            note(shaped, Product(flat, kernel, operands, returned=True))
            found = STEPS[step](shaped, bias)
            if known(found) is not None:
                note(found, known(found)._replace(returned=True))
            losses = getattr(ops, name)(targets, found, from_logits=True)
            total = tf.reduce_sum(losses * upstream)
        largest = ops.argmax(found, axis=-1)
        return losses, largest, *tape.gradient(total, [inputs, kernel, bias])

    def traced(is_there):
        on_gpu(is_there)
        made.clear()
        found = run.python_function  # Traced anew.
        again = tf.function(
            found, jit_compile=True, input_signature=run.input_signature
        )
        return made, [
            np.zeros(1) if x is None else np.asarray(x)
            for x in again(*map(tf.constant, (INPUTS, KERNEL, BIAS)))
        ]

    _, whole = traced(False)
    assert not made
    _, chunks = traced(True)
    assert made == [number]
    np.testing.assert_allclose(chunks[0], whole[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(chunks[1], whole[1])
    rounding = 2.0 ** (-7 if half == "bfloat16" else -10)
    for x, expected in zip(chunks[2:], whole[2:], strict=True):
        np.testing.assert_allclose(x, expected, atol=rounding * np.abs(expected).max())


# Models -----------------------------------------------------------------------------


def dense(activation=None):
    ids = keras.Input((LENGTH,), dtype="int32")
    x = layers.Dense(WIDTH, "tanh")(layers.Embedding(CLASSES, WIDTH)(ids))
    return keras.Model(ids, layers.Dense(CLASSES, activation)(x))


def with_softmax_layer():
    ids = keras.Input((LENGTH,), dtype="int32")
    x = layers.Dense(CLASSES)(layers.Embedding(CLASSES, WIDTH)(ids))
    return keras.Model(ids, layers.Softmax()(x))


def tied(cap=None):
    ids = keras.Input((LENGTH,), dtype="int32")
    embedding = layers.ReversibleEmbedding(CLASSES, WIDTH, logit_soft_cap=cap)
    x = layers.Dense(WIDTH, "tanh")(embedding(ids))
    return keras.Model(ids, embedding(x, reverse=True))


class OneImage(layers.Layer):
    """(batch, length, width) as images with one row."""

    def call(self, x):
        return x[:, None]


def convolution():
    ids = keras.Input((LENGTH,), dtype="int32")
    x = OneImage()(layers.Embedding(CLASSES, WIDTH)(ids))
    return keras.Model(
        ids, layers.Reshape((LENGTH, CLASSES))(layers.Conv2D(CLASSES, 1)(x))
    )


SPARSE = keras.losses.SparseCategoricalCrossentropy
MODELS = {
    "dense": (dense, {}),
    "softmax": (lambda: dense("softmax"), {"loss": SPARSE()}),
    "softmax layer": (with_softmax_layer, {"loss": SPARSE()}),
    "tied": (tied, {}),
    "capped": (lambda: tied(2.0), {}),
    "accuracy": (dense, {"metrics": ["accuracy"]}),
    "accuracy of a softmax": (
        lambda: dense("softmax"),
        {"loss": SPARSE(), "metrics": ["accuracy"]},
    ),
    "ignored class": (dense, {"loss": SPARSE(from_logits=True, ignore_class=3)}),
    "two steps": (dense, {"steps_per_execution": 2}),
}
# Why the loss reads the logits as a whole.
WHOLE = {
    "metrics that read them": (
        dense,
        {"metrics": ["sparse_top_k_categorical_accuracy"]},
    ),
    "recomputed": (dense, {"recompute_logits": True}),
    "another loss": (dense, {"loss": keras.losses.MeanSquaredError()}),
}


def made_from(name, policy, jit_compile=True):
    make, options = (MODELS | WHOLE)[name]
    options = dict(options)
    recompute = options.pop("recompute_logits", False)
    keras.utils.set_random_seed(0)
    if recompute:
        policy = type(keras_mp.Policy(policy))(recompute_logits=True)
    with keras_mp.policy_scope(policy):
        model = make()
    options = {"loss": SPARSE(from_logits=True)} | options
    model.compile(keras.optimizers.SGD(1.0), jit_compile=jit_compile, **options)
    return model


def trained(name, policy, jit_compile=True):
    """The losses of the epochs, and how the weights have changed."""
    model, y = made_from(name, policy, jit_compile), LABELS
    before = model.get_weights()
    if name == "another loss":
        y = np.eye(CLASSES, dtype="float32")[LABELS]
    # The last batch is shorter: its size becomes unknown.
    logs = model.fit(IDS, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    updates = [a - b for a, b in zip(model.get_weights(), before, strict=True)]
    return logs["loss"], updates


def largest_difference(updates, expected):
    return max(
        np.abs(a - b).max() / np.abs(b).max()
        for a, b in zip(updates, expected, strict=True)
    )


def train_in_chunks_as_in_float32(name, policy, made):
    expected, updates = trained(name, "float32", jit_compile=False)
    assert not made
    losses, found = trained(name, policy)
    assert made
    rounding = 2.0 ** (-8 if policy == "mixed_bfloat16" else -11)
    assert losses == pytest.approx(expected, rel=rounding)
    assert largest_difference(found, updates) <= 8 * rounding


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_in_chunks_as_in_float32(name, on_gpu, made):
    train_in_chunks_as_in_float32(name, "mixed_float16", made)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow("The same programs in the other half precision.")
def test_so_it_does_in_bfloat16(name, on_gpu, made):
    train_in_chunks_as_in_float32(name, "mixed_bfloat16", made)


@pytest.mark.parametrize("name", WHOLE)
def test_otherwise_the_loss_reads_logits_as_a_whole(name, on_gpu, made):
    trained(name, "mixed_float16")
    assert not made


def test_so_it_does_on_cpus_and_without_xla(on_gpu, made):
    trained("dense", "mixed_float16", jit_compile=False)
    on_gpu(False)
    trained("dense", "mixed_float16")
    assert not made


def test_a_gpu_is_asked_for_where_the_user_wants_the_step(monkeypatch):
    assert not private.is_for_gpu()
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [gpu])
    found = []

    def ask():
        found.append(private.is_for_gpu())

    def ask_within():
        with tf.device("CPU:0"):
            tf.function(ask)()

    tf.function(ask)()
    tf.function(ask_within)()
    with tf.device("CPU:0"):
        tf.function(ask)()
    assert found == [True, False, False]


def step_of(model):
    step = tf.function(model.train_step, jit_compile=True)
    batch = tf.constant(IDS[:4]), tf.constant(LABELS[:4])
    return step, batch


@pytest.mark.parametrize("name", ["dense", "softmax", "tied", "accuracy"])
def test_whole_logits_are_not_in_the_program(name, on_gpu):
    model = made_from(name, "mixed_float16")

    def rows_of_logits():
        step, batch = step_of(model)
        text = step.experimental_get_compiler_ir(batch)(stage="optimized_hlo")
        return set(re.findall(rf"= \w+\[(\d+),{CLASSES}\][^ ]* dot\(", text))

    assert rows_of_logits() - {f"{WIDTH}"} == {"8"}  # Less the kernel's gradient.
    on_gpu(False)
    assert rows_of_logits() - {f"{WIDTH}"} == {"24"}


def test_the_operands_of_products_are_half_precision(on_gpu):
    model = made_from("dense", "mixed_float16")
    step, batch = step_of(model)
    # The logits of three chunks, and as a whole, which nothing reads; the gradient by
    # the inputs. That by the kernel, and three of a Dense.
    assert counted(in_hlo(step, batch)) == {"float16 -> float32": 5, "float16": 4}


def test_a_branch_reads_logits_as_a_whole(on_gpu, made):
    model = made_from("dense", "mixed_float16")

    @tf.function(
        jit_compile=True, input_signature=[tf.TensorSpec((None, LENGTH), "int64")] * 2
    )
    def gradients(ids, labels):
        weights = [v.value for v in model.trainable_variables]
        with tf.GradientTape() as tape:
            tape.watch(weights)
            outputs = model(ids)
            loss = tf.cond(
                tf.reduce_sum(labels) > 0,
                lambda: tf.reduce_mean(model.loss(labels, outputs)),
                lambda: tf.reduce_mean(outputs),
            )
        return tape.gradient(loss, weights)

    assert np.isfinite(gradients(IDS, LABELS)[-1]).all() and not made


def test_labels_that_are_no_class_are_nan_as_without_chunks(on_gpu, made):
    with keras_mp.policy_scope("mixed_float16"):
        model = dense()
    model.compile("sgd", SPARSE(from_logits=True), jit_compile=True)
    labels = LABELS.copy()
    labels[0, :2] = -1, CLASSES

    def losses():
        @tf.function(jit_compile=True)
        def run(ids):
            return ops.sparse_categorical_crossentropy(labels, model(ids), True)

        return run(tf.constant(IDS))

    chunks = losses()
    assert made
    on_gpu(False)
    np.testing.assert_allclose(chunks, losses(), rtol=1e-5)
    assert np.isnan(chunks).sum() == 2


def test_gradients_can_be_differentiated(on_gpu, made):
    loss = SPARSE(from_logits=True)
    model = made_from("dense", "mixed_float16")
    with keras_mp.policy_scope("float32"):
        reference = dense()
    reference.set_weights(model.get_weights())

    def penalized(model):
        @tf.function(jit_compile=True)
        def run(ids, labels):
            weights = [v.value for v in model.trainable_variables]
            with tf.GradientTape() as outer:
                outer.watch(weights)
                with tf.GradientTape() as tape:
                    tape.watch(weights)
                    value = loss(labels, model(ids))
                squares = [
                    tf.reduce_sum(tf.convert_to_tensor(g) ** 2)
                    for g in tape.gradient(value, weights)
                ]
                penalty = tf.add_n(squares)
            return penalty, *outer.gradient(penalty, weights)

        return [tf.convert_to_tensor(x) for x in run(IDS, LABELS)]

    made.clear()
    found = penalized(model)
    assert made
    for x, expected in zip(found, penalized(reference), strict=True):
        largest = np.abs(expected).max()
        np.testing.assert_allclose(x, expected, rtol=0, atol=2.0**-7 * largest)


def test_nothing_of_ours_keeps_a_graph(on_gpu):
    with tf.Graph().as_default() as graph:
        inputs, kernel = tf.zeros((4, WIDTH)), tf.zeros((WIDTH, CLASSES))
        outputs = inputs @ kernel
        note(outputs, Product(inputs, kernel, HalfOperands("float16", "float16")))
        logits.classes.note(outputs, tf.argmax(outputs, -1))
    held = weakref.ref(graph)
    del graph, inputs, kernel, outputs
    gc.collect()
    assert held() is None and not logits.noted.facts and not logits.classes.facts
