"""What the suite `quality` trains to the end: real data, small enough for two cores."""

import collections
import pathlib
import re
import sysconfig
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers

from benchmarks import models


class Data(NamedTuple):
    """The training data and the test data, as NumPy arrays."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


class Task(NamedTuple):
    """A training to the end.

    Attributes:
        name: for `--case`.
        title: for the tables.
        metric: which result of `evaluate` counts, and its unit.
        data: () -> the data, the same at each call.
        build: (`auto_scale_loss` of `compile`) -> the model, compiled.
        batch, epochs: of the training.
        stock: whether to train with Keras' own mixed_float16, too.
    """

    name: str
    title: str
    metric: tuple[str, str]
    data: Callable[[], Data]
    build: Callable[[bool], Any]
    batch: int
    epochs: int
    stock: bool = False


# Handwritten digits ---------------------------------------------------------------


def _digits() -> Data:
    from sklearn.datasets import load_digits

    found = load_digits()
    images = (found.images[..., None] / 16).astype("float32")
    order = np.random.default_rng(0).permutation(len(images))
    test, train = np.split(order, [len(order) // 5])
    labels = found.target.astype("int32")
    return Data(images[train], labels[train], images[test], labels[test])


def _digits_cnn(auto_scale_loss: bool) -> Any:
    model = keras.Sequential([keras.Input((8, 8, 1))])
    for filters in (16, 32):
        model.add(layers.Conv2D(filters, 3, padding="same", use_bias=False))
        model.add(layers.BatchNormalization(momentum=0.9))
        model.add(layers.ReLU())
        model.add(layers.MaxPooling2D())
    model.add(layers.Flatten())
    model.add(layers.Dense(10, activation="softmax"))
    model.compile(
        keras.optimizers.Adam(2e-3),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        auto_scale_loss=auto_scale_loss,
    )
    return model


# Python's own standard library, character by character and word by word -------------

LENGTH, CHARACTERS = 64, 98
# With a width of 64 it is a head whose operands are half precision.
WORDS = 4096
FILES = ("argparse.py", "ast.py", "datetime.py", "decimal.py", "doctest.py",
         "inspect.py", "pdb.py", "subprocess.py", "tarfile.py", "threading.py",
         "typing.py", "zipfile.py")  # fmt: skip
TRAIN_WINDOWS, TEST_WINDOWS = 3200, 640


def _standard_library() -> str:
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    # Some are packages in one version of Python and modules in another.
    paths = [folder / name for name in FILES if (folder / name).exists()]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def _characters() -> Data:
    # Tab, newline and the printable ASCII characters; one more stands for the rest.
    return _next_of([_character(c) for c in _standard_library()])


def _words() -> Data:
    # Words, punctuation marks and newlines: the most frequent; 0 stands for the rest.
    words = re.findall(r"\w+|[^\w\s]|\n", _standard_library())
    frequent = collections.Counter(words).most_common(WORDS - 1)
    ids = {word: i for i, (word, _) in enumerate(frequent, start=1)}
    return _next_of([ids.get(word, 0) for word in words])


def _next_of(ids: list[int]) -> Data:
    """Windows of a text, and the same one token later; its last tenth is the test."""
    train, test = np.split(np.array(ids, "int32"), [len(ids) * 9 // 10])
    x, y = _windows(train, TRAIN_WINDOWS)
    return Data(x, y, *_windows(test, TEST_WINDOWS))


def _character(character: str) -> int:
    code = ord(character)
    if 32 <= code < 127:
        return code - 32
    return {"\n": 95, "\t": 96}.get(character, 97)


def _windows(ids: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    starts = np.random.default_rng(0).integers(0, len(ids) - LENGTH - 1, number)
    windows = ids[starts[:, None] + np.arange(LENGTH + 1)]
    return windows[:, :-1], windows[:, 1:]


def _language_model(vocabulary: int, auto_scale_loss: bool) -> Any:
    model = models.decoder(vocabulary, LENGTH, width=64, depth=2, heads=4)
    model.compile(
        keras.optimizers.Adam(3e-3, global_clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        auto_scale_loss=auto_scale_loss,
    )
    return model


# A deep network of sigmoids ---------------------------------------------------------


def _one_hot_digits() -> Data:
    digits = _digits()
    rows = np.eye(10, dtype="float32")
    return digits._replace(y=rows[digits.y], test_y=rows[digits.test_y])


def _deep_sigmoids(auto_scale_loss: bool) -> Any:
    """A network in which each sigmoid divides the gradient by four or more.

    With the squared error, as such networks used to be trained, most of the gradient
    underflows in float16. Adam divides by its size and learns from it all the same.
    """
    model = keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten()])
    for _ in range(5):
        model.add(layers.Dense(64, activation="sigmoid"))
    model.add(layers.Dense(10, activation="sigmoid"))
    model.compile(
        keras.optimizers.Adam(3e-3, epsilon=1e-12),
        "mse",
        metrics=["accuracy"],
        auto_scale_loss=auto_scale_loss,
    )
    return model


# Targets past 65504 -------------------------------------------------------------------

UNIT = 20_000.0


def _friedman() -> Data:
    """Friedman's first function of five of ten numbers, in units of 1/20000.

    Source: Friedman 1991, "Multivariate Adaptive Regression Splines", section 4.3.
    """
    random = np.random.default_rng(0)
    x = random.uniform(size=(4096, 10)).astype("float32")
    y = (
        10 * np.sin(np.pi * x[:, 0] * x[:, 1])
        + 20 * (x[:, 2] - 0.5) ** 2
        + 10 * x[:, 3]
        + 5 * x[:, 4]
        + random.normal(size=len(x))
    )
    y = (UNIT * y[:, None]).astype("float32")
    return Data(x[:3072], y[:3072], x[3072:], y[3072:])


def _regression(auto_scale_loss: bool) -> Any:
    model = keras.Sequential(
        [
            keras.Input((10,)),
            layers.Dense(64, activation="relu"),
            layers.Dense(64, activation="relu"),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.03), "mae", auto_scale_loss=auto_scale_loss)
    return model


TASKS = (
    Task("digits", "digits, a CNN", ("accuracy", "accuracy"),
         _digits, _digits_cnn, batch=32, epochs=12),
    Task("language", "Python's library, a language model",
         ("loss", "nats per character"),
         _characters, partial(_language_model, CHARACTERS), batch=32, epochs=2),
    Task("words", "Python's library, 4096 words", ("loss", "nats per word"),
         _words, partial(_language_model, WORDS), batch=32, epochs=2),
    Task("sigmoids", "digits, a deep network of sigmoids", ("accuracy", "accuracy"),
         _one_hot_digits, _deep_sigmoids, batch=256, epochs=200),
    Task("regression", "targets past 65504", ("loss", "mean absolute error"),
         _friedman, _regression, batch=64, epochs=100, stock=True),
)  # fmt: skip
