"""The loss of a large head on torch, in chunks of the classes, beside all at once."""

import keras
import numpy as np
import pytest
from allpairspy import AllPairs
from backends import BACKEND, values

if BACKEND != "torch":
    pytest.skip("chunks of torch", allow_module_level=True)

import torch
from half_products_torch import use_kernel
from keras import layers, ops
from torch import func

import keras_mp
from benchmarks.kernels.private import TorchDispatchMode
from keras_mp.kernels.products import size_of_chunk
from keras_mp.kernels.torch import cross_entropy
from keras_mp.kernels.torch.logits import known
from keras_mp.policies import weights
from keras_mp.repairs.products import HalfOperands, half_operands

pytestmark = pytest.mark.usefixtures("installed")

CLASSES, WIDTH = 300, 16
RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.normal(size=(24, WIDTH)).astype("float32")
KERNEL = RANDOM.normal(size=(WIDTH, CLASSES)).astype("float32")
BIAS = RANDOM.normal(size=(CLASSES,)).astype("float32")
LABELS = RANDOM.integers(0, CLASSES, 24)
LABELS[:2] = 0, CLASSES - 1


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """Heads are large, and so are their logits: five chunks of (24, 300)."""
    use_kernel(monkeypatch)
    monkeypatch.setattr(weights, "LARGE", 1)
    monkeypatch.setattr(cross_entropy, "_CHUNK", 24 * 128 * 4)


@pytest.fixture
def made(monkeypatch):
    """The numbers of chunks of each loss that was computed in chunks."""
    numbers, original = [], cross_entropy.CrossEntropyInChunks.apply

    def apply(*args):
        numbers.append(args[-1])
        return original(*args)

    monkeypatch.setattr(cross_entropy.CrossEntropyInChunks, "apply", apply)
    return numbers


def at_once(monkeypatch):
    monkeypatch.setattr(cross_entropy, "_CHUNK", 2**40)


def loss_of(inputs, kernel, bias, operands, labels=LABELS):
    with half_operands(operands):
        logits = ops.matmul(inputs, kernel)
    logits = logits if bias is None else ops.add(logits, bias)
    losses = ops.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    return torch.mean(losses)


@pytest.mark.parametrize(
    ("classes", "number", "size"),
    [(300, 3, 128), (50257, 25, 2048), (50304, 25, 2048), (128256, 63, 2048)],
)
def test_a_chunk_is_a_multiple_of_what_matrix_units_take(classes, number, size):
    assert size_of_chunk(classes, number) == size


HALVES = {
    "float16": ("float16", "float16"),
    "not scaled": ("float16", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
}
TABLE = [[*HALVES], ["bias", "no bias"], [True, False], ["2 axes", "3 axes"]]
TABLE += [["all labels", "some ignored"], ["all", "no kernel", "no inputs"]]


@pytest.mark.parametrize("case", [*AllPairs(TABLE)], ids=lambda case: f"{case}")
@pytest.mark.kernels
def test_loss_and_gradients_are_those_of_float64(case, made):
    half, with_bias, tied, axes, which, wanted = case
    labels = np.where(np.arange(24) % 3 == 1, -100, LABELS)
    labels = torch.tensor(labels if which == "some ignored" else LABELS)
    operands = HalfOperands(*HALVES[half], tied, "in chunks")
    tensors = [torch.tensor(x) for x in (INPUTS, KERNEL, BIAS)]
    tensors[0].requires_grad = wanted != "no inputs"
    tensors[1].requires_grad = wanted != "no kernel"
    tensors[2].requires_grad = with_bias == "bias"
    inputs, kernel, bias = tensors
    if axes == "3 axes":
        inputs, labels = inputs.reshape(4, 6, WIDTH), labels.reshape(4, 6, 1)
    loss = loss_of(
        inputs, kernel, bias if with_bias == "bias" else None, operands, labels
    )
    loss.backward()
    assert made == [3]

    dtype = getattr(torch, operands.dtype)
    rounded = [x.detach().to(dtype).double().requires_grad_() for x in tensors[:2]]
    exact = torch.tensor(BIAS).double().requires_grad_()
    logits = rounded[0] @ rounded[1] + (exact if with_bias == "bias" else 0)
    expected = torch.nn.functional.cross_entropy(
        logits, labels.flatten(), reduction="none"
    ).mean()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    rounding = torch.finfo(dtype).eps
    for tensor, reference in zip(tensors, [*rounded, exact], strict=True):
        assert (tensor.grad is not None) == tensor.requires_grad
        if tensor.requires_grad:
            assert tensor.grad.dtype == torch.float32
            error = (tensor.grad - reference.grad).norm() / reference.grad.norm()
            assert error <= rounding


DERIVATIVES = {
    "twice": lambda f: lambda x: torch.autograd.functional.hvp(f, x, x)[1],
    "func.grad": func.grad,
    "func.jvp": lambda f: lambda x: func.jvp(f, (x,), (x,))[1],
    "func.hessian": func.hessian,
    "vmap": lambda f: lambda x: func.vmap(func.grad(f))(x[None]),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_other_derivatives_are_those_of_all_at_once(derivative, monkeypatch):
    operands = HalfOperands("bfloat16", "bfloat16", False, "in chunks")
    inputs, bias = torch.tensor(INPUTS), torch.tensor(BIAS)

    def f(kernel):
        return loss_of(inputs, kernel, bias, operands)

    found = derivative(f)(torch.tensor(KERNEL))
    at_once(monkeypatch)
    expected = derivative(f)(torch.tensor(KERNEL))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_label_that_is_no_class_is_refused_as_keras_does():
    operands = HalfOperands("bfloat16", "bfloat16", False, "in chunks")
    kernel = torch.tensor(KERNEL, requires_grad=True)
    for label in (-1, CLASSES):
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            loss_of(torch.tensor(INPUTS), kernel, None, operands, np.full(24, label))


# Trainings --------------------------------------------------------------------------


def ending_in(*ends):
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(CLASSES, WIDTH)(inputs)
    x = layers.Dense(WIDTH, activation="relu")(x)
    for end in ends:
        x = end(x)
    return keras.Model(inputs, x)


def tied():
    inputs = keras.Input((6,), dtype="int32")
    embedding = layers.ReversibleEmbedding(CLASSES, WIDTH)
    x = layers.Dense(WIDTH, activation="relu")(embedding(inputs))
    return keras.Model(inputs, embedding(x, reverse=True))


def subclassed():
    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = [layers.Embedding(CLASSES, WIDTH), layers.Dense(CLASSES)]

        def call(self, x):
            return self.parts[1](self.parts[0](x))

    model = Subclassed()
    model(IDS)
    return model


def lora():
    dense = layers.Dense(CLASSES)
    model = ending_in(dense)
    dense.enable_lora(2)
    return model


IDS = RANDOM.integers(0, CLASSES, (4, 6))
MODELS = {
    "Dense": lambda: ending_in(layers.Dense(CLASSES)),
    "no bias": lambda: ending_in(layers.Dense(CLASSES, use_bias=False)),
    "EinsumDense": lambda: ending_in(
        layers.EinsumDense("abc,cd->abd", (None, CLASSES), bias_axes="d")
    ),
    "convolution": lambda: ending_in(layers.Conv1D(CLASSES, 1)),
    "tied": tied,
    "subclassed": subclassed,
    "LoRA": lora,
}
LEFT = {  # As they were: what they return is not just a product and a bias.
    "capped": lambda: ending_in(
        layers.Dense(CLASSES), layers.Lambda(lambda x: 5 * ops.tanh(x / 5))
    ),
    "softmax": lambda: ending_in(layers.Dense(CLASSES, activation="softmax")),
    "reshaped": lambda: ending_in(layers.Dense(CLASSES), layers.Reshape((6, CLASSES))),
}


def trained(build, policy="mixed_bfloat16", softmax=False, loss=None, **options):
    keras_mp.set_global_policy(policy)
    keras.utils.set_random_seed(0)
    model = build()
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=not softmax)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    weights = np.linspace(0.5, 2, 24).reshape(4, 6)
    fit = {"sample_weight": weights, "epochs": 3, "verbose": 0, "batch_size": 4}
    fitted = model.fit(IDS, (IDS + 1) % CLASSES, **fit, **options)
    assert not known.facts
    return model, fitted.history


@pytest.mark.parametrize("name", [*MODELS, *LEFT])
@pytest.mark.kernels
def test_a_training_in_chunks_is_that_of_all_at_once(name, made, monkeypatch):
    build, options = (MODELS | LEFT)[name], {"softmax": name == "softmax"}
    _, in_chunks = trained(build, **options)
    assert made == ([3] * 3 if name in MODELS else [])
    at_once(monkeypatch)
    _, expected = trained(build, **options)
    for key, wanted in expected.items():
        np.testing.assert_allclose(in_chunks[key], wanted, rtol=2e-3, err_msg=key)


@pytest.mark.kernels
def test_a_skipped_step_leaves_no_trace(made, monkeypatch):
    model, _ = trained(MODELS["Dense"], "mixed_float16")
    optimizer = model.optimizer
    optimizer.retake_steps, optimizer._loss_scaling.retakes = 0, False
    before = values([*model.variables, *optimizer.inner_optimizer.variables])
    optimizer.dynamic_scale.assign(2.0**40)
    made.clear()
    model.train_on_batch(IDS, (IDS + 1) % CLASSES)
    assert made == [3] and int(optimizer.skipped_steps) == 1
    after = values([*model.variables, *optimizer.inner_optimizer.variables])
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


def test_ignored_classes_go_keras_way(made):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=3)
    trained(MODELS["Dense"], loss=loss)
    assert made == []


@pytest.mark.kernels
def test_validation_reads_all_logits(made):
    trained(MODELS["Dense"], validation_data=(IDS, IDS))
    assert made == [3] * 3


# What is there at a time ------------------------------------------------------------


class Sizes(TorchDispatchMode):
    """The sizes of the tensors that operations make, those of views left out."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {
            x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)
        }
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            if result.untyped_storage().data_ptr() not in given:
                self.seen.append(result.numel())
        return result


@pytest.mark.parametrize(("name", "logits"), [("no bias", 1), ("Dense", 2)])
@pytest.mark.kernels
def test_neither_their_gradient_nor_probabilities_are_there_as_a_whole(name, logits):
    model, _ = trained(MODELS[name])
    x, y = torch.tensor(IDS), torch.tensor((IDS + 1) % CLASSES)
    with Sizes() as sizes:
        model.train_on_batch(x, y)
    # The product, and the sum with the bias.
    assert sizes.seen.count(24 * CLASSES) == logits
    assert max(sizes.seen) == 24 * CLASSES


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.kernels
def test_torch_compile_makes_one_graph_of_a_loss_at_once(made):
    operands = HalfOperands("bfloat16", "bfloat16", False, "in chunks")
    inputs, labels = torch.tensor(INPUTS), torch.tensor(LABELS)

    def loss(kernel):
        return loss_of(inputs, kernel, None, operands, labels)

    kernel = torch.tensor(KERNEL, requires_grad=True)
    expected = loss(kernel)
    assert made == [3]
    found = torch.compile(loss, backend="aot_eager", fullgraph=True)(kernel)
    assert made == [3]
    torch.testing.assert_close(found, expected)


def test_a_gradient_of_logits_that_somebody_wants_is_there(made):
    operands = HalfOperands("bfloat16", "bfloat16", False, "in chunks")

    def gradients(watch):
        with half_operands(operands):
            logits = ops.matmul(torch.tensor(INPUTS), kernel)
        seen = watch(logits)
        losses = ops.sparse_categorical_crossentropy(LABELS, logits, from_logits=True)
        losses.mean().backward()
        return logits.grad if seen is None else seen

    kernel = torch.tensor(KERNEL, requires_grad=True)
    kept = gradients(lambda logits: logits.retain_grad())
    hooked = []
    gradients(lambda logits: (logits.register_hook(hooked.append), hooked)[1])
    assert made == [] and kept.abs().sum() > 0
    torch.testing.assert_close(hooked[0], kept)


@pytest.mark.kernels
def test_asked_for_afterwards_a_gradient_of_logits_is_an_error(made):
    with half_operands(HalfOperands("bfloat16", "bfloat16", False, "in chunks")):
        logits = ops.matmul(
            torch.tensor(INPUTS), torch.tensor(KERNEL, requires_grad=True)
        )
    losses = ops.sparse_categorical_crossentropy(LABELS, logits, from_logits=True)
    assert made == [3]
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(losses.sum(), logits)


def test_diagnosis_sees_the_gradient_of_logits(made, monkeypatch):
    model, _ = trained(MODELS["no bias"], "mixed_float16")
    made.clear()
    found = keras_mp.diagnose(model, IDS, (IDS + 1) % CLASSES)
    assert made == []
    at_once(monkeypatch)
    assert str(keras_mp.diagnose(model, IDS, (IDS + 1) % CLASSES)) == str(found)
