"""A large head and its loss in chunks, beside the loss of all logits."""

import functools
import re

import keras
import numpy as np
import pytest
from allpairspy import AllPairs

if keras.backend.backend() != "jax":
    pytest.skip("chunks are made on JAX alone", allow_module_level=True)

import jax
import jax.numpy as jnp
from keras import layers, ops
from processes import on_four_devices
from products import lowered
from test_heads import cross_entropy_of

import keras_mp
from keras_mp.kernels import logits as kernels_logits
from keras_mp.kernels import products
from keras_mp.kernels.jax import large_heads
from keras_mp.kernels.logits import Product
from keras_mp.policies import weights
from keras_mp.repairs import logits as known_logits
from keras_mp.repairs.jax import one_pass
from keras_mp.repairs.products import HalfOperands

pytestmark = pytest.mark.usefixtures("installed")

CLASSES, WIDTH = 300, 6
RANDOM = np.random.default_rng(0)
LABELS = RANDOM.integers(0, CLASSES, (4, 6))
LABELS[0, :3] = 7, -1, CLASSES  # Two of them are no classes.
INPUTS = RANDOM.normal(size=(4, 6, WIDTH)).astype("float32")
KERNEL = RANDOM.normal(size=(WIDTH, CLASSES)).astype("float32")
BIAS = RANDOM.normal(size=(CLASSES,)).astype("float32")


@pytest.fixture
def every_head_is_large(monkeypatch):
    monkeypatch.setattr(weights, "LARGE", 1)
    # Of 4 x 6 x 300 there are 4 chunks: of the rows, or of the classes.
    monkeypatch.setattr(products, "ONE_CHUNK", 2**11)
    monkeypatch.setattr(large_heads, "ROWS", 6)


@pytest.fixture
def made(monkeypatch):
    """The numbers of chunks of each loss that was computed in chunks."""
    numbers = []

    def losses(head, labels, number):
        numbers.append(number)
        return original(head, labels, number)

    original = large_heads.losses
    monkeypatch.setattr(large_heads, "losses", losses)
    return numbers


# What a head does to its product, and a loss to the logits; in NumPy, with the slope.
VALID = LABELS[..., None] != 7
STEPS = {
    "nothing": (lambda x, bias: x, lambda x, bias: (x, 1)),
    "bias": (ops.add, lambda x, bias: (x + bias, 1)),
    "bias and cap": (
        lambda x, bias: ops.multiply(ops.tanh(ops.divide(ops.add(x, bias), 5.0)), 5.0),
        lambda x, bias: (y := 5 * np.tanh((x + bias) / 5), 1 - np.square(y / 5)),
    ),
    "ignored": (
        lambda x, bias: ops.where(VALID, x, 0),
        lambda x, bias: (np.where(VALID, x, 0), VALID),
    ),
}
WRAPPED = {
    "jit": lambda f: f,
    "checkpoint": jax.checkpoint,
    "vmap": lambda f: (
        lambda *args: jax.tree.map(
            lambda x: x[0], jax.vmap(f)(*(x[None] for x in args))
        )
    ),
}
HALVES = {
    "float32": ("float32", "float32"),
    "float16": ("float16", "float16"),
    "not scaled": ("float16", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
}
ONE_HOT = (LABELS[..., None] == np.arange(CLASSES)).astype("float32")
TARGETS = {"labels": LABELS, "probabilities": 0.8 * ONE_HOT + 0.2 / CLASSES}
MODES = ["in chunks", "recomputed"]
TABLE = [[*STEPS], [*HALVES], MODES, [1, 3, 5], [*WRAPPED], [*TARGETS], *[[0, 1]] * 2]


@pytest.mark.parametrize("case", [*AllPairs(TABLE)], ids=lambda case: f"{case}")
@pytest.mark.kernels
def test_losses_and_gradients_are_those_of_float64(case):
    step, half, mode, number, wrapped, kind, tied, classes = case
    operands = HalfOperands(*HALVES[half], bool(tied), mode, bool(classes))

    def of_chunks(inputs, kernel, bias):
        half = (x.astype(operands.dtype) for x in (inputs, kernel))
        product = jnp.matmul(*half, preferred_element_type="float32")
        known_logits.note(product, Product(inputs, kernel, operands))
        head = known_logits.known(STEPS[step][0](product, bias))
        losses, classes = large_heads.losses(head, jnp.asarray(TARGETS[kind]), number)
        return jnp.mean(losses), classes

    rounded = [x.astype(operands.dtype).astype("float64") for x in (INPUTS, KERNEL)]
    logits, *expected = in_float64(STEPS[step][1], *rounded, kind)
    of_chunks = jax.value_and_grad(WRAPPED[wrapped](of_chunks), (0, 1, 2), has_aux=True)
    found = jax.jit(of_chunks)(INPUTS, KERNEL, BIAS)
    rounding = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[operands.dtype]
    loss, largest = found[0]
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    if classes:
        own = np.take_along_axis(logits, np.asarray(largest)[..., None], -1)
        np.testing.assert_allclose(own[..., 0], logits.max(-1), rtol=1e-5)
    for gradient, wanted in zip(found[1], expected[1], strict=True):
        gradient = np.asarray(gradient, "float64")
        error = np.linalg.norm(gradient - wanted)
        assert error <= 2 * rounding * np.linalg.norm(wanted)


@pytest.fixture
def in_rows():
    """The losses of a head in three chunks of the rows."""
    operands = HalfOperands("float16", "float16", False, "in chunks", classes=True)

    def losses(inputs, kernel, step=lambda x: x, labels=LABELS):
        product = jnp.matmul(inputs, kernel, preferred_element_type="float32")
        known_logits.note(product, Product(inputs, kernel, operands))
        head = known_logits.known(step(product))
        return large_heads.losses(head, labels, 3)[0]

    return losses


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.kernels
def test_of_the_logits_nothing_but_slopes_in_half_precision_stays(step, in_rows):
    change = STEPS[step][0]
    run = functools.partial(in_rows, step=lambda x: change(x, BIAS))
    _, pull = jax.vjp(lambda x: run(x, KERNEL), jnp.asarray(INPUTS))
    kept = [x for x in jax.tree.leaves(pull) if x.shape[-1:] == (CLASSES,)]
    kept = [(x.dtype.name, x.shape) for x in kept if x.ndim > 2]
    assert kept == [("float16", (3, LABELS.size // 3, CLASSES))]
    evaluated = str(jax.make_jaxpr(run)(INPUTS, KERNEL))
    assert f"f32[{LABELS.size // 3},{CLASSES}]" in evaluated
    assert f"f16[3,{LABELS.size // 3},{CLASSES}]" not in evaluated


def test_the_kernel_is_multiplied_once_for_each_gradient(in_rows):
    """And not for that of a frozen kernel."""

    def products(*of):
        gradient = jax.grad(lambda *x: in_rows(*x).sum(), of)
        return lowered(gradient, (INPUTS, KERNEL), "cuda").count("dot_general")

    assert products(0, 1) == 3 + 2 and products(0) == 3 + 1


@pytest.mark.parametrize(
    ("rows", "tied", "dtype"),
    [(64, True, "f32"), (63, True, "f16"), (64, False, "f16")],
)
def test_a_large_gradient_by_tied_weights_is_half(rows, tied, dtype):
    """One of at most half of the slopes' bytes is float32."""
    width, operands = 16, HalfOperands("float16", "float16", tied, "in chunks")

    def losses(inputs, kernel):
        head = Product(inputs, kernel, operands)
        return large_heads.losses(head, jnp.zeros(rows, "int32"), 3)[0].sum()

    ones = jnp.ones((rows, width)), jnp.ones((width, CLASSES))
    text = lowered(jax.grad(losses, 1), ones, "cuda")
    made = rf"dot_general .*-> tensor<{width}x{CLASSES}x(f\d+)>"
    assert re.findall(made, text) == [dtype]


@pytest.mark.parametrize(
    ("step", "number"),
    [
        (lambda x: ops.add(x, BIAS), 4),
        (lambda x: ops.tanh(ops.add(x, BIAS)), 4),
        (lambda x: ops.add(ops.tanh(x), BIAS), 0),
        (lambda x: ops.multiply(x, BIAS), 0),
        (lambda x: ops.add(x, INPUTS[..., :1]), 0),
    ],
    ids=["bias", "bias and cap", "cap and bias", "factor", "one for each row"],
)
@pytest.mark.kernels
def test_a_head_whose_gradient_needs_more_is_read_as_a_whole(
    step, number, every_head_is_large
):
    product = jnp.matmul(INPUTS, KERNEL)
    operands = HalfOperands("float16", "float16", logits="in chunks")
    known_logits.note(product, Product(INPUTS, KERNEL, operands))
    assert large_heads.number_for(known_logits.known(step(product))) == number


def test_the_gradient_of_a_label_that_is_almost_certain_is_not_rounded_away(in_rows):
    kernel = np.zeros((WIDTH, CLASSES), "float32")
    kernel[0, 7] = 12.0  # Its logit; all others are 0.
    inputs = np.eye(1, WIDTH, dtype="float32")
    gradient = jax.grad(lambda x: in_rows(x, kernel, labels=np.array([7])).sum())(
        inputs
    )
    rest = (CLASSES - 1) * np.exp(-12.0)  # 0.0018: float16's steps below 1 are 0.0005.
    np.testing.assert_allclose(gradient[0, 0], -12 * rest / (1 + rest), rtol=1e-2)


@pytest.mark.kernels
def test_a_temperature_does_not_make_slopes_overflow(in_rows):
    kernel = KERNEL / 5000

    def summed(inputs, kernel):
        return in_rows(inputs, kernel, lambda x: ops.multiply(x, 5000.0)).sum()

    found = jax.grad(summed, (0, 1))(INPUTS, kernel)
    _, _, (by_inputs, by_kernel, _) = in_float64(
        STEPS["nothing"][1], INPUTS, KERNEL, "labels"
    )
    for gradient, wanted in zip(found, (by_inputs, by_kernel * 5000), strict=True):
        wanted = wanted * LABELS.size
        error = np.linalg.norm(gradient - wanted)
        assert error <= 2e-3 * np.linalg.norm(wanted)


@pytest.mark.kernels
def test_classes_that_are_masked_have_no_gradient(in_rows):
    mask = np.zeros(CLASSES, "float32")
    mask[:200] = -np.inf
    labels = np.array([[250, 299]])

    def summed(mask):
        def run(inputs, kernel):
            return in_rows(inputs, kernel, lambda x: ops.add(x, mask), labels).sum()

        return jax.value_and_grad(run, (0, 1))(INPUTS[:1, :2], KERNEL)

    loss, (by_inputs, by_kernel) = summed(mask)
    masked = np.where(mask < 0, 0, 1)
    logits = np.where(mask < 0, -np.inf, INPUTS[:1, :2] @ KERNEL).astype("float64")
    slope = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    slope -= np.arange(CLASSES) == labels[..., None]
    wanted = np.einsum("btd,btv->dv", INPUTS[:1, :2], slope)
    assert np.isfinite(loss) and not (np.asarray(by_kernel) * (1 - masked)).any()
    np.testing.assert_allclose(by_kernel, wanted, atol=2e-3)
    np.testing.assert_allclose(by_inputs, slope @ KERNEL.T, atol=2e-2)
    # What is not finite stays so, for the check of the gradients.
    mask[250] = np.inf
    _, gradients = summed(mask)
    assert not all(np.isfinite(x).all() for x in gradients)


def test_probabilities_have_a_gradient_too():
    operands = HalfOperands("float32", "float32", False, "in chunks")
    head = Product(INPUTS, KERNEL, operands)
    found = jax.grad(lambda x: large_heads.losses(head, x, 3)[0].sum())(
        jnp.asarray(ONE_HOT)
    )
    expected = -jax.nn.log_softmax(INPUTS @ KERNEL)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_it_has_no_forward_derivative():
    operands = HalfOperands("float32", "float32", False, "recomputed")

    def of_chunks(inputs):
        return large_heads.losses(Product(inputs, KERNEL, operands), LABELS, 3)[0]

    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(of_chunks, (INPUTS,), (INPUTS,))


@pytest.mark.parametrize("classes", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_tpu_makes_one_chunk_unless_it_recomputes(mode, classes):
    operands = HalfOperands("bfloat16", "bfloat16", False, mode, classes)
    gradient = jax.grad(
        lambda x: large_heads.losses(Product(x, KERNEL, operands), LABELS, 3)[0].sum()
    )
    counts = {
        platform: lowered(gradient, (INPUTS,), platform).count("stablehlo.dot_general")
        for platform in ("cuda", "tpu")
    }
    # Of the gradient's two products the kernel's is not asked for.
    expected = {"cuda": 3 + 1, "tpu": 2} if mode == "in chunks" else None
    assert counts == (expected or dict.fromkeys(counts, 3 * 3))


def in_float64(step, inputs, kernel, kind):
    """The logits, the mean loss, and its gradients: by inputs, kernel and bias."""
    product = inputs @ kernel
    logits, slope = step(product, BIAS.astype("float64"))
    highest = logits.max(-1, keepdims=True)
    sums = highest + np.log(np.exp(logits - highest).sum(-1, keepdims=True))
    targets = ONE_HOT if kind == "labels" else TARGETS[kind].astype("float64")
    losses = (targets * (sums - logits)).sum(-1)
    gradient = np.exp(logits - sums) * targets.sum(-1, keepdims=True) - targets
    gradient = gradient / LABELS.size * slope
    by_bias = gradient.sum((0, 1))
    if step in (STEPS["nothing"][1], STEPS["ignored"][1]):
        by_bias = np.zeros_like(by_bias)
    rows = gradient.reshape(-1, CLASSES)
    by_kernel = inputs.reshape(-1, WIDTH).T @ rows
    return logits, losses.mean(), (gradient @ kernel.T, by_kernel, by_bias)


def decoder(kind="tied"):
    keras.utils.set_random_seed(0)
    ids = keras.Input((6,), dtype="int32")
    embedding = layers.ReversibleEmbedding(
        CLASSES, WIDTH, logit_soft_cap=5.0 if kind == "capped" else None
    )
    x = layers.LayerNormalization()(embedding(ids))
    if kind in ("tied", "capped"):
        return keras.Model(ids, embedding(x, reverse=True))
    if kind == "einsum":
        head = layers.EinsumDense("btd,dv->btv", (None, CLASSES), bias_axes="v")
    elif kind == "convolution":
        head = layers.Conv1D(CLASSES, 1)
    elif kind == "softmax apart":
        x, head = layers.Dense(CLASSES)(x), layers.Activation("softmax")
    else:
        head = layers.Dense(CLASSES, "softmax" if kind == "softmax" else None)
    return keras.Model(ids, head(x))


IDS = RANDOM.integers(0, CLASSES, (8, 6))


def trained(model, loss=None, metrics=(), fit=(), **options):
    """The losses and the weights after two epochs."""
    optimizer, loss = options.pop("optimizer", "adam"), loss or cross_entropy_of(model)
    model.compile(optimizer, loss, metrics=list(metrics), **options)
    labels = np.concatenate([LABELS.clip(0, CLASSES - 1)] * 2)
    history = model.fit(IDS, labels, batch_size=4, epochs=2, verbose=0, **dict(fit))
    return history.history["loss"], model.get_weights()


def unchunked(function, *args, **kwargs):
    """Calls a function while all logits are small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "ONE_CHUNK", 2**40)
        return function(*args, **kwargs)


def assert_alike(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for weight, wanted in zip(found[1], expected[1], strict=True):
        assert np.linalg.norm(weight - wanted) <= 2e-3 * np.linalg.norm(wanted)


KINDS = ["tied", "capped", "dense", "softmax", "softmax apart", "einsum"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled
@pytest.mark.kernels
def test_a_training_in_chunks_is_that_of_all_logits(kind, every_head_is_large, made):
    keras_mp.set_global_policy("mixed_float16")
    expected = unchunked(trained, decoder(kind))
    assert not made
    for recompute, metrics in [
        (False, []),
        (False, ["accuracy"]),
        (True, ["accuracy"]),
        (False, ["accuracy", TOP_3]),
    ]:
        keras_mp.set_global_policy(keras_mp.MixedFloat16(recompute_logits=recompute))
        made.clear()
        assert_alike(trained(decoder(kind), metrics=metrics), expected)
        assert set(made) == (set() if TOP_3 in metrics else {4})


TOP_3 = "sparse_top_k_categorical_accuracy"
ACCURACIES = {
    "tied": lambda: "accuracy",
    "capped": keras.metrics.SparseCategoricalAccuracy,
    "dense": lambda: keras.metrics.sparse_categorical_accuracy,
    "softmax": lambda: "sparse_categorical_accuracy",
    "softmax apart": lambda: keras.metrics.SparseCategoricalAccuracy(name="own"),
    "einsum": lambda: "acc",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled
@pytest.mark.kernels
def test_accuracy_comes_with_the_loss(kind, every_head_is_large, monkeypatch):
    keras_mp.set_global_policy("mixed_float16")

    def accuracies():
        model = decoder(kind)
        accuracy = ACCURACIES[kind]()
        model.compile("adam", cross_entropy_of(model), weighted_metrics=[accuracy])
        validation = {"validation_data": (IDS, IDS)}
        history = model.fit(IDS, IDS, epochs=8, verbose=0, **validation).history
        return [values for name, values in history.items() if "loss" not in name]

    expected = unchunked(accuracies)
    read, original = [], kernels_logits.classes.get

    def get(tensor):
        found = original(tensor)
        read.append(found is not None)
        return found

    monkeypatch.setattr(kernels_logits.classes, "get", get)
    np.testing.assert_allclose(accuracies(), expected, rtol=1e-5)
    assert max(expected[0]) > 0
    assert read == [True, True]  # In training and in validation.


def test_the_largest_logit_is_the_one_that_argmax_finds():
    logits = RANDOM.integers(0, 4, (64, CLASSES)).astype("float32")
    logits[0, ::7], logits[1], logits[2] = np.nan, np.nan, -np.inf
    found = one_pass.log_sums_and_largest(jnp.asarray(logits))
    np.testing.assert_array_equal(found[2][1:], jnp.argmax(logits[1:], -1))
    assert 0 <= found[2][0] < CLASSES  # Any class beside a nan.
    np.testing.assert_array_equal(found[1][3:], logits[3:].max(-1))
    sums = one_pass.log_sums(jnp.asarray(logits))
    np.testing.assert_allclose(found[0], sums, rtol=1e-6)  # Of two passes on CPUs.


def test_a_loss_of_an_inner_program_tells_the_outer_one_nothing(every_head_is_large):
    keras_mp.set_global_policy("mixed_float16")
    model = decoder()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    weights = [v.value for v in model.trainable_variables]

    def run(weights):
        outputs, _ = model.stateless_call(weights, [], IDS)
        value = jax.lax.cond(IDS.sum() > 0, lambda: loss(IDS, outputs), lambda: 0.0)
        return value, ops.argmax(outputs, axis=-1), jnp.argmax(outputs, axis=-1)

    _, found, expected = jax.jit(run)(weights)
    np.testing.assert_array_equal(found, expected)


def test_metrics_of_what_is_made_of_logits_read_that(every_head_is_large, made):
    keras_mp.set_global_policy("mixed_float16")
    model = decoder()
    model = keras.Model(model.inputs, keras.ops.negative(model.output))
    trained(model, metrics=["accuracy"])
    assert not made


OPTIONS = {
    "sample weights": {"fit": {"sample_weight": np.linspace(0, 1, 48).reshape(8, 6)}},
    "steps_per_execution": {"steps_per_execution": 2},
    "ignored": {
        "loss": keras.losses.SparseCategoricalCrossentropy(True, ignore_class=7)
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.kernels
def test_so_it_is_with(options, every_head_is_large, made):
    keras_mp.set_global_policy("mixed_float16")
    expected = unchunked(trained, decoder(), **options)
    assert_alike(trained(decoder(), **options), expected)
    assert made


@pytest.mark.parametrize("kind", ["a mask", "two outputs"])
@pytest.mark.kernels
def test_so_it_is_with_models_of_another_form(kind, every_head_is_large, made):
    keras_mp.set_global_policy("mixed_float16")

    def run():
        keras.utils.set_random_seed(0)
        ids = keras.Input((6,), dtype="int32")
        x = layers.Embedding(CLASSES, WIDTH, mask_zero=kind == "a mask")(ids)
        outputs = [layers.Dense(CLASSES)(x), layers.Dense(CLASSES, "softmax")(x)]
        outputs = outputs[:1] if kind == "a mask" else outputs
        model = keras.Model(ids, outputs)
        both = [keras.losses.SparseCategoricalCrossentropy(x) for x in (True, False)]
        model.compile("adam", both[: len(outputs)])
        rows = np.where(IDS % 3 == 0, 0, IDS)
        history = model.fit(rows, [IDS] * len(outputs), epochs=2, verbose=0)
        return history.history["loss"], model.get_weights()

    expected = unchunked(run)
    assert not made
    assert_alike(run(), expected)
    assert made


@pytest.mark.kernels
def test_so_it_is_with_accumulated_gradients_and_a_skipped_step(
    every_head_is_large, made
):
    keras_mp.set_global_policy("mixed_float16")

    def optimizer():
        inner = keras.optimizers.Adam(gradient_accumulation_steps=2)
        # The first gradients overflow.
        scales = {"initial_scale": 2.0**40, "max_scale": 2.0**40}
        return keras_mp.LossScaleOptimizer(inner, **scales)

    expected = unchunked(trained, decoder(), optimizer=optimizer())
    model = decoder()
    assert_alike(trained(model, optimizer=optimizer()), expected)
    assert made and model.optimizer.skipped_steps > 0


@pytest.mark.kernels
def test_so_it_is_with_smoothed_probabilities(every_head_is_large, made):
    keras_mp.set_global_policy("mixed_float16")
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)

    def losses():
        model = decoder()
        model.compile("adam", loss)
        y = keras.utils.to_categorical(IDS, CLASSES)
        return model.fit(IDS, y, epochs=2, verbose=0).history["loss"]

    expected = unchunked(losses)
    assert not made
    np.testing.assert_allclose(losses(), expected, rtol=1e-5)
    assert made


@pytest.mark.parametrize("kind", ["convolution", "no head", "eager", "remat"])
def test_what_is_not_known_is_left_as_it_was(kind, every_head_is_large, made):
    keras_mp.set_global_policy("mixed_float16")
    if kind == "remat":
        with keras.RematScope(mode="full"):
            model = decoder("dense")
    else:
        model = decoder("convolution" if kind == "convolution" else "tied")
    options = {"run_eagerly": kind == "eager"}
    if kind == "no head":
        options["loss"] = lambda y, x: ops.sum(ops.square(x), axis=-1)
    trained(model, **options)
    assert not made


def test_how_many_chunks_there_are():
    def of_rows(rows, classes=50257):
        return large_heads.number_of_chunks(rows, classes, "in chunks")

    # None if the logits are small; 1024 rows or more in each chunk, and equally many.
    assert of_rows(8192, 1000) == of_rows(2000) == 0
    assert [of_rows(x) for x in (2048, 8192, 8202)] == [2, 8, 6]
    # More than eight if a chunk of them would take more than 268 MB.
    assert [of_rows(x) for x in (2**14, 2**15, 2**20)] == [8, 16, 16]
    assert of_rows(8209) == 8  # A prime number: the last rows are zeros.
    sizes = {"1 MB": 2**18, "a decoder": 4096 * 50257, "large": 2**34}
    of_classes = functools.partial(large_heads.number_of_chunks, logits="recomputed")
    found = {x: of_classes(1, n) for x, n in sizes.items()}
    assert found == {"1 MB": 1, "a decoder": 4, "large": 32}
    assert large_heads.number_of_chunks(2**20, 50257, "whole") == 0


@pytest.mark.slow("Several devices or processes; one such test stays in `make test`.")
def test_on_several_devices_losses_are_the_same():
    found = on_four_devices("chunks_on_devices.py")
    numbers = {kind: number for kind, (number, _) in found.items()}
    # A device has a quarter of the examples. Where classes may be parted the loss is
    # Keras' own.
    assert numbers == {"one": 8, "data": 2, "model": 0}
    losses = [losses for _, losses in found.values()]
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-5)
