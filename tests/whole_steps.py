"""Train steps of real models, compiled for a GPU or a TPU, and what is in them."""

import functools
import re
from collections import Counter
from typing import NamedTuple

import keras
import numpy as np
from compiled_steps import Program, build, bytes_of_kernels, platform, step_of

import keras_mp
from benchmarks.models import decoder, dense, vision_transformer

layers = keras.layers


def with_dropout():
    """A block of a decoder that no fused kernel takes: its attention has dropout."""
    ids = keras.Input((512,), dtype="int32")
    x = layers.Embedding(8192, 768)(ids)
    attention = layers.MultiHeadAttention(12, 64, dropout=0.1)
    x = layers.Add()([x, attention(x, x, use_causal_mask=True)])
    return keras.Model(ids, layers.Dense(8192)(layers.LayerNormalization()(x)))


CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
IMAGES = (224, 224, 3), "float32"
# How a model is made, its loss, the batch, and shape and dtype of one input and target.
MODELS = {
    "decoder": (
        lambda: decoder(50257, 512, 768, 2, 12),
        *(CROSSENTROPY, 8, ((512,), "int32"), ((512,), "int32")),
    ),
    "dropout": (
        with_dropout,
        *(CROSSENTROPY, 8, ((512,), "int32"), ((512,), "int32")),
    ),
    "MLP": (
        lambda: dense(4096, 4),
        *("mse", 4096, ((4096,), "float32"), ((4096,), "float32")),
    ),
    "ViT": (
        lambda: vision_transformer(224, 16, 768, 2, 12, 1000),
        *(CROSSENTROPY, 32, IMAGES, ((), "int32")),
    ),
    "ResNet-50": (
        lambda: keras.applications.ResNet50(weights=None, classifier_activation=None),
        *(CROSSENTROPY, 32, IMAGES, ((), "int32")),
    ),
}
# XLA tries Triton's tiles on the GPU; without one it takes some that do not fit the 197
# rows of ViT, and fails. All its products are cuBLAS's then.
OPTIONS = {("gpu", "ViT"): {"xla_gpu_enable_triton_gemm": False}}
# Calls of cuBLAS and cuDNN whose first two operands are multiplied.
LIBRARIES = ("__cublas$", "__cudnn$conv")
# The two products of attention are one kernel of a library, and the four of its
# gradient are one of cuDNN's and two of a TPU's.
FUSED = {
    r'"__cudnn\$fmha\w*?Softmax"': 2,
    r'"__cudnn\$fmha\w*?SoftmaxBackward"': 4,
    '"tpu_custom_call"': 2,
}


class Product(NamedTuple):
    """A matrix product or convolution: dtypes, and the operation that it comes from."""

    operands: tuple[str, str]
    result: str
    source: str

    def __str__(self):
        return f"{' x '.join(self.operands)} -> {self.result}"


class Step(NamedTuple):
    """A compiled train step and its products."""

    program: Program
    products: list[Product]

    def __str__(self):
        text = self.program.text
        sizes = {d: bytes_of_kernels(text, d) for d in ("f32", "f16", "bf16")}
        return (
            f"products {dict(Counter(map(str, self.products)))}, "
            f"{fused_products(text)} in fused attention; "
            f"{kernels(text)} kernels, {self.program.count('convert')} converts, "
            f"{self.program.count('conditional')} conditionals; "
            f"peak {self.program.peak / 1e6:.0f} MB; read and written "
            + ", ".join(f"{d} {size / 1e6:.0f} MB" for d, size in sizes.items())
        )


@functools.cache
def whole_step(name, policy, **options):
    """The train step of `fit` with Adam, under a policy of keras_mp."""
    keras.backend.clear_session()
    make, loss, batch, *ends = MODELS[name]
    if options:
        policy = type(keras_mp.Policy(policy))(**options)
    with keras_mp.policy_scope(policy):
        model = make()
    model.compile("adam", loss)
    data = tuple(np.zeros((batch, *shape), dtype) for shape, dtype in ends)
    build(model, data)
    model.make_train_function()
    program = step_of(model, data, **OPTIONS.get((platform(), name), {}))
    return Step(program, list(products(program.text)))


@functools.cache
def bfloat16_step(name, rounded):
    """The same with bfloat16 weights and slots, by Adam or with stochastic rounding."""
    keras.backend.clear_session()
    make, loss, batch, *ends = MODELS[name]
    keras.config.set_dtype_policy("bfloat16")
    try:
        model = make()
    finally:
        keras.config.set_dtype_policy("float32")
    model.compile(
        keras_mp.StochasticRoundingOptimizer("adam") if rounded else "adam", loss
    )
    data = tuple(np.zeros((batch, *shape), dtype) for shape, dtype in ends)
    build(model, data)
    model.make_train_function()
    program = step_of(model, data, **OPTIONS.get((platform(), name), {}))
    return Step(program, list(products(program.text)))


def fused_products(text):
    """How many products lie in kernels of fused attention."""
    return sum(len(re.findall(name, text)) * number for name, number in FUSED.items())


def written(text, shape):
    """The dtypes in which the kernels of a program write arrays of a shape."""
    entry = text[text.index("\nENTRY") :]
    return set(re.findall(rf"([a-z]+\d*)\[{','.join(map(str, shape))}\]", entry))


def kernels(text):
    entry = text[text.index("\nENTRY") :]
    return len(re.findall(r" (?:fusion|custom-call|dot|convolution)\(", entry))


def products(text):
    """The products of optimized HLO, those inside of fusions too."""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            dtypes = {}  # Of a computation; names are its own.
        found = re.match(r"\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z-]*)\((.*)", line)
        if found is None:
            continue
        name, shape, operation, rest = found.groups()
        dtypes[name] = re.search(r"[a-z]+\d*(?:e\d+m\d+\w*)?(?=\[)|$", shape)[0]
        target = re.search(r'custom_call_target="([^"]*)|$', rest)[1] or ""
        if operation in ("dot", "convolution") or target.startswith(LIBRARIES):
            first, second = re.findall(r"%([\w.-]+)", rest)[:2]
            source = re.search(r'op_name="([^"]*)|$', rest)[1] or name
            yield Product((dtypes[first], dtypes[second]), dtypes[name], source)
