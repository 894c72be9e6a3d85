"""What the suite `train` measures: four networks, large and small, and KerasHub's."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

from benchmarks import models
from benchmarks.compiled.cases import CASES as COMPILED
from benchmarks.compiled.cases import LENGTH


class TrainCase(NamedTuple):
    """A network, and the batch for its training.

    Attributes:
        name: for `--case`.
        title: for the tables, on a GPU.
        small_title: the same on CPUs; empty for a case of GPUs alone.
        make: sizes -> (model, operations of the forward pass for one example, or None
            where nobody has counted them).
        data: (batch, sizes) -> (x, y), NumPy arrays.
        loss: () -> the loss for `compile`.
        sizes, batch: on a GPU.
        small_sizes, small_batch: on CPUs.
        backends: those that it is measured on.
    """

    name: str
    title: str
    small_title: str
    make: Callable[..., tuple[Any, float | None]]
    data: Callable[..., tuple[Any, np.ndarray]]
    loss: Callable[[], Any]
    sizes: dict[str, int]
    batch: int
    small_sizes: dict[str, int]
    small_batch: int
    backends: tuple[str, ...] = ("jax", "torch")


def _random() -> np.random.Generator:
    return np.random.default_rng(0)


def _cross_entropy() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _mlp(width: int, depth: int) -> tuple[Any, float]:
    return models.dense(width, depth), 2.0 * depth * width**2


def _vectors(batch: int, width: int, **_: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = _random().standard_normal((2, batch, width), dtype="float32")
    return x, y


def _decoder(**sizes: int) -> tuple[Any, float]:
    length, width, depth = sizes["length"], sizes["width"], sizes["depth"]
    head = 2.0 * length * width * sizes["vocabulary"]
    return models.decoder(**sizes), depth * _block(length, width) + head


def _block(length: int, width: int) -> float:
    """Operations of a block: at each position 12 products of width x width, and two of
    length x length x width, counted in full where a causal mask hides half of them.
    """
    return 2.0 * 12 * length * width**2 + 2.0 * 2 * length**2 * width


def _ids(
    batch: int, vocabulary: int, length: int, **_: int
) -> tuple[np.ndarray, np.ndarray]:
    x, y = _random().integers(0, vocabulary, (2, batch, length), dtype="int32")
    return x, y


def _vit(**sizes: int) -> tuple[Any, float]:
    width, depth = sizes["width"], sizes["depth"]
    patches = (sizes["side"] // sizes["patch"]) ** 2
    first = 2.0 * patches * 3 * sizes["patch"] ** 2 * width
    head = 2.0 * width * sizes["classes"]
    operations = first + depth * _block(patches + 1, width) + head
    return models.vision_transformer(**sizes), operations


def _resnet50(side: int, classes: int, filters: int = 0) -> tuple[Any, float]:
    """ResNet-50, or with `filters` a small residual network."""
    if filters:
        model = models.convolutions(side, filters, stages=3, classes=classes)
    else:
        model = keras.applications.ResNet50(
            weights=None,
            input_shape=(side, side, 3),
            classes=classes,
            classifier_activation=None,
        )
    return model, _operations_of_convolutions(model)


def _operations_of_convolutions(model: Any) -> float:
    """Two for each weight and each position where it is used; dense layers, too."""
    total = 0.0
    for layer in model.layers:
        if isinstance(layer, keras.layers.Conv2D | keras.layers.Dense):
            outputs = math.prod(layer.output.shape[1:])
            positions = outputs / layer.kernel.shape[-1]
            total += 2.0 * math.prod(layer.kernel.shape) * positions
    return total


def _images(
    batch: int, side: int, classes: int, **_: int
) -> tuple[np.ndarray, np.ndarray]:
    x = _random().standard_normal((batch, side, side, 3), dtype="float32")
    return x, _random().integers(0, classes, batch, dtype="int32")


def _language_model(name: str, vocabulary: int) -> TrainCase:
    """One of KerasHub's, as the suite `compiled` has it, with words drawn at random."""
    compiled = COMPILED[name]

    def data(batch: int, vocabulary: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        ids, target = _ids(batch, vocabulary, LENGTH)
        return {"token_ids": ids, "padding_mask": np.ones(ids.shape, "bool")}, target

    return TrainCase(
        name.lower(),
        f"KerasHub's {name}",
        "",
        lambda vocabulary: (compiled.build(), None),
        data,
        _cross_entropy,
        {"vocabulary": vocabulary},
        compiled.batch,
        {},
        0,
        backends=("jax",),
    )


TRAIN_CASES = (
    TrainCase(
        "mlp", "MLP, 8 layers of 4096", "MLP, 4 layers of 512",
        _mlp, _vectors, keras.losses.MeanSquaredError,
        dict(width=4096, depth=8), 4096,
        dict(width=512, depth=4), 64,
    ),
    TrainCase(
        "decoder", "decoder, GPT-2 small", "decoder, 2 blocks of 128",
        _decoder, _ids, _cross_entropy,
        # A multiple of 64 instead of 50257, as is usual.
        dict(vocabulary=50304, length=1024, width=768, depth=12, heads=12), 8,
        dict(vocabulary=512, length=64, width=128, depth=2, heads=4), 8,
    ),
    TrainCase(
        "vit", "ViT-B/16", "ViT, 2 blocks of 128",
        _vit, _images, _cross_entropy,
        dict(side=224, patch=16, width=768, depth=12, heads=12, classes=1000), 64,
        dict(side=32, patch=4, width=128, depth=2, heads=4, classes=10), 8,
    ),
    TrainCase(
        "resnet50", "ResNet-50", "ResNet, 10 convolutions",
        _resnet50, _images, _cross_entropy,
        dict(side=224, classes=1000), 128,
        dict(side=32, classes=10, filters=16), 16,
    ),
    _language_model("GPT-2", 50257),
    _language_model("Llama", 32000),
    _language_model("Gemma", 256000),
)  # fmt: skip
