"""What the suite `quality` trains to the end: real data, small enough for two cores."""

import collections
import functools
import importlib.util
import pathlib
import re
import sysconfig
from collections.abc import Callable
from functools import partial
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers

import keras_mp
from benchmarks import models
from keras_mp_cli.digits import convolutions, load_digits


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
        build: () -> the model, its optimizer, and what else `compile` takes.
        batch, epochs: of the training.
        controls: policies of Keras' own to train with as well, without this package.
        package: the one that has the model.
    """

    name: str
    title: str
    metric: tuple[str, str]
    data: Callable[[], Data]
    build: Callable[[], tuple[Any, Any, dict[str, Any]]]
    batch: int
    epochs: int
    controls: tuple[str, ...] = ()
    package: str = "keras"

    @property
    def is_possible(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


# Handwritten digits ---------------------------------------------------------------

_CLASSES = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}
_TOKENS = {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}


def _digits() -> Data:
    train, test = load_digits()
    return Data(*train, *test)


def _digits_cnn() -> Any:
    return convolutions(16, 32), keras.optimizers.Adam(2e-3), _CLASSES


def _digits_mlp() -> Any:
    """A network whose steps are less than half of bfloat16's for most weights."""
    model = keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten()])
    for _ in range(2):
        model.add(layers.Dense(128, activation="relu"))
    model.add(layers.Dense(10, activation="softmax"))
    return model, keras.optimizers.Adam(5e-5), _CLASSES


class Energies(layers.Layer):
    """The energy of each pixel over the mean energy of the image, on any scale.

    In float16 the squares of an image with values past 256 are infinite, and infinity
    over infinity is nan.
    """

    def call(self, images: Any) -> Any:
        energies = keras.ops.square(images)
        return energies / keras.ops.mean(energies, axis=(1, 2, 3), keepdims=True)


def _digits_with_one_on_another_scale() -> Data:
    digits = _digits()
    scale = np.ones((len(digits.x), 1, 1, 1), "float32")
    scale[100] = 1000
    return digits._replace(x=digits.x * scale)


def _energies_cnn() -> Any:
    inputs = keras.Input((8, 8, 1))
    outputs = convolutions(16, 32)(Energies()(inputs))
    return keras.Model(inputs, outputs), keras.optimizers.Adam(2e-3), _CLASSES


# Python's own standard library, character by character and word by word -------------

LENGTH, CHARACTERS = 64, 98
# With a width of 64 this makes a head whose operands are half precision.
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
    return _next_of(_word_ids()[0])


def _word_ids() -> tuple[list[int], list[int]]:
    """The ids of the most frequent words in library and manual; 0 for the rest."""
    texts = _standard_library(), "\n".join(topics.values())
    # Words, punctuation marks and newlines.
    words = [re.findall(r"\w+|[^\w\s]|\n", text) for text in texts]
    frequent = collections.Counter(words[0]).most_common(WORDS - 1)
    ids = {word: i for i, (word, _) in enumerate(frequent, start=1)}
    library, manual = ([ids.get(word, 0) for word in part] for part in words)
    return library, manual


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


# What comes next is one of as many words as a small language has.
MANY_WORDS, CONTEXT = 30_000, 8


def _after_eight_words() -> Data:
    """Eight words of Python's library, its packages included, and the next one."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    modules = [*folder.glob("*.py"), *folder.glob("*/*.py")]
    paths = [p for p in modules if p.parent.name not in ("site-packages", "test")]
    texts = [p.read_text(encoding="utf-8", errors="ignore") for p in sorted(paths)]
    words = re.findall(r"\w+|[^\w\s]|\n", "\n".join(texts))
    frequent = collections.Counter(words).most_common(MANY_WORDS - 1)
    known = {word: i for i, (word, _) in enumerate(frequent, start=1)}
    ids = np.array([known.get(word, 0) for word in words], "int32")
    train, test = np.split(ids, [len(ids) * 9 // 10])
    return Data(*_next_one(train, 40_000), *_next_one(test, 4_000))


def _next_one(ids: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    starts = np.random.default_rng(0).integers(0, len(ids) - CONTEXT, number)
    windows = ids[starts[:, None] + np.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, -1]


def _many_classes() -> Any:
    """A softmax over 30,000 words, and its loss from probabilities."""
    model = keras.Sequential(
        [
            keras.Input((CONTEXT,), dtype="int32"),
            layers.Embedding(MANY_WORDS, 32),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(MANY_WORDS, activation="softmax"),
        ]
    )
    return model, keras.optimizers.SGD(1.0, momentum=0.9), _CLASSES


def _language_model(vocabulary: int) -> Any:
    model = models.decoder(vocabulary, LENGTH, width=64, depth=2, heads=4)
    return model, keras.optimizers.Adam(3e-3, global_clipnorm=1.0), _TOKENS


# A small Gemma that has read Python's library and now reads its manual --------------


def _manual() -> Data:
    return _next_of(_word_ids()[1])


def _fine_tuned(lora: bool) -> Any:
    pretrained = _weights_of_the_library()
    model = _gemma(lora)
    for variable, value in zip(_without_lora(model), pretrained, strict=True):
        variable.assign(value)
    return model, keras.optimizers.AdamW(1e-2 if lora else 1e-3), _TOKENS


def _gemma(lora: bool) -> Any:
    import keras_hub

    backbone = keras_hub.models.GemmaBackbone(
        vocabulary_size=WORDS,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=1,
        hidden_dim=64,
        intermediate_dim=256,
        head_dim=16,
    )
    if lora:
        backbone.enable_lora(4)
    language_model = keras_hub.models.GemmaCausalLM(backbone, preprocessor=None)
    ids = keras.Input((LENGTH,), dtype="int32")
    everything = keras.ops.ones_like(ids, dtype="bool")
    return keras.Model(
        ids, language_model({"token_ids": ids, "padding_mask": everything})
    )


def _without_lora(model: Any) -> list[Any]:
    return [v for v in model.weights if not v.name.startswith("lora_")]


@functools.cache
def _weights_of_the_library() -> list[np.ndarray]:
    """The weights after one epoch in float32."""
    with keras_mp.policy_scope("float32"):
        model = _gemma(lora=False)
    model.compile(keras.optimizers.AdamW(3e-3), **_TOKENS)
    data = _words()
    model.fit(data.x, data.y, batch_size=32, verbose=0)
    return list(model.get_weights())


# A deep network of sigmoids ---------------------------------------------------------


def _one_hot_digits() -> Data:
    digits = _digits()
    rows = np.eye(10, dtype="float32")
    return digits._replace(y=rows[digits.y], test_y=rows[digits.test_y])


def _deep_sigmoids() -> Any:
    """A network in which each sigmoid divides the gradient by four or more.

    With the squared error, as such networks used to be trained, most of the gradient
    underflows in float16. Adam divides by its size and learns from it all the same.
    """
    model = keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten()])
    for _ in range(5):
        model.add(layers.Dense(64, activation="sigmoid"))
    model.add(layers.Dense(10, activation="sigmoid"))
    compiled_with = {"loss": "mse", "metrics": ["accuracy"]}
    return model, keras.optimizers.Adam(3e-3, epsilon=1e-12), compiled_with


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


def _regression() -> Any:
    model = keras.Sequential(
        [
            keras.Input((10,)),
            layers.Dense(64, activation="relu"),
            layers.Dense(64, activation="relu"),
            layers.Dense(1),
        ]
    )
    return model, keras.optimizers.Adam(0.03), {"loss": "mae"}


TASKS = (
    Task("digits", "digits, a CNN", ("accuracy", "accuracy"),
         _digits, _digits_cnn, batch=32, epochs=12, controls=("bfloat16",)),
    Task("small-steps", "digits, Adam with 5e-5", ("accuracy", "accuracy"),
         _digits, _digits_mlp, batch=32, epochs=60, controls=("bfloat16",)),
    Task("language", "Python's library, a language model",
         ("loss", "nats per character"),
         _characters, partial(_language_model, CHARACTERS), batch=32, epochs=2),
    Task("words", "Python's library, 4096 words", ("loss", "nats per word"),
         _words, partial(_language_model, WORDS), batch=32, epochs=2),
    Task("fine-tuned", "Gemma, made small, fine-tuned", ("loss", "nats per word"),
         _manual, partial(_fine_tuned, False), batch=32, epochs=1, package="keras_hub"),
    Task("lora", "Gemma, made small, LoRA of rank 4", ("loss", "nats per word"),
         _manual, partial(_fine_tuned, True), batch=32, epochs=1, package="keras_hub"),
    Task("sigmoids", "digits, a deep network of sigmoids", ("accuracy", "accuracy"),
         _one_hot_digits, _deep_sigmoids, batch=256, epochs=200,
         controls=("mixed_float16",)),
    Task("regression", "targets past 65504", ("loss", "mean absolute error"),
         _friedman, _regression, batch=64, epochs=100,
         controls=("mixed_float16",)),
    Task("one-bad-image", "digits, one of 1438 on another scale",
         ("accuracy", "accuracy"), _digits_with_one_on_another_scale, _energies_cnn,
         batch=32, epochs=4, controls=("mixed_float16",)),
    Task("many-classes", "the next of 30,000 words", ("accuracy", "accuracy"),
         _after_eight_words, _many_classes, batch=2048, epochs=2,
         controls=("mixed_float16",)),
)  # fmt: skip
