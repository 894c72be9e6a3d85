"""How models end: every kind of model, last activation and loss, in half precision.

Every model goes through the cast of what it returns and what `compile` decides for its
output layer. This table tries both: {kinds of model} x {compiled, or in a loop of one's
own} x {last activation, of a layer or applied by the model} x {each loss of Keras that
fits} x {policies}. Each case trains a few steps. Losses and the change of the weights
agree with those of one float32 model up to rounding.

`python -m sweeps.endings` runs all of it on every backend; `tests/test_endings.py` runs
cases that cover every pair of two entries.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers

import keras_mp
from sweeps.table import BACKEND, main

POLICIES = ("mixed_float16", "mixed_bfloat16", "bfloat16")
STEPS = 2
EXAMPLES, FEATURES, CLASSES, FRAMES = 16, 6, 4, 5
# Results differ by at most this many units of roundoff: 6 sqrt(8), the tolerance of
# `layer_errors.py`, which has the reason.
UNIT_ROUNDOFF = {
    "mixed_float16": 2.0**-11,
    "mixed_bfloat16": 2.0**-8,
    "bfloat16": 2.0**-8,
}
ROUNDINGS = 6 * 8**0.5


# Losses ----------------------------------------------------------------------------


class Loss(NamedTuple):
    """One loss of Keras: its class, its function, and what they are called with.

    Attributes:
        name: the name of the class in `keras.losses`.
        function: the name of the function there.
        targets: the kind of its targets, a key of TARGETS.
        options: keyword arguments of both.
    """

    name: str
    function: str
    targets: str
    options: dict[str, Any] = {}

    def object(self) -> Any:
        return getattr(keras.losses, self.name)(**self.options)

    def of(self, y: Any, predicted: Any) -> Any:
        """The mean of the function, as a loop of one's own would take it."""
        function = getattr(keras.losses, self.function)
        return keras.ops.mean(function(y, predicted, **self.options))


_LOGITS = {"from_logits": True}
_CCE = ("CategoricalCrossentropy", "categorical_crossentropy", "one hot")
_FOCAL = ("CategoricalFocalCrossentropy", "categorical_focal_crossentropy", "one hot")
_SPARSE = ("SparseCategoricalCrossentropy", "sparse_categorical_crossentropy", "class")
_BCE = ("BinaryCrossentropy", "binary_crossentropy", "bits")
_BINARY_FOCAL = ("BinaryFocalCrossentropy", "binary_focal_crossentropy", "bits")
_GENERALIZED = (
    "CategoricalGeneralizedCrossEntropy",
    "categorical_generalized_cross_entropy",
    "class",
)
# Circle is left out: it is for embeddings on a sphere, which none of these models has.
LOSSES: dict[str | None, tuple[Loss, ...]] = {
    "softmax": (
        Loss(*_CCE),
        Loss(*_FOCAL),
        Loss(*_SPARSE),
        Loss(*_GENERALIZED, {"q": 0.5}),
        Loss("KLDivergence", "kl_divergence", "one hot"),
        Loss("Dice", "dice", "one hot"),
        Loss("Tversky", "tversky", "one hot"),
    ),
    "sigmoid": (
        Loss(*_BCE),
        Loss(*_BINARY_FOCAL),
        Loss("Poisson", "poisson", "bits"),
        Loss(
            "MeanSquaredLogarithmicError",
            "mean_squared_logarithmic_error",
            "bits",
        ),
    ),
    None: (
        Loss(*_CCE, _LOGITS),
        Loss(*_FOCAL, _LOGITS),
        Loss(*_SPARSE, _LOGITS),
        Loss(*_BCE, _LOGITS),
        Loss(*_BINARY_FOCAL, _LOGITS),
        Loss("CTC", "ctc", "labels"),
        Loss("MeanSquaredError", "mean_squared_error", "values"),
        Loss("MeanAbsoluteError", "mean_absolute_error", "far values"),
        Loss(
            "MeanAbsolutePercentageError",
            "mean_absolute_percentage_error",
            "far values",
        ),
        Loss("Huber", "huber", "values"),
        Loss("LogCosh", "log_cosh", "values"),
        Loss("CosineSimilarity", "cosine_similarity", "values"),
        Loss("Hinge", "hinge", "signs"),
        Loss("SquaredHinge", "squared_hinge", "signs"),
        Loss("CategoricalHinge", "categorical_hinge", "one hot"),
    ),
}


def _targets(kind: str) -> np.ndarray:
    draw = np.random.default_rng(1)
    classes = draw.integers(0, CLASSES, EXAMPLES)
    values = draw.normal(size=(EXAMPLES, CLASSES)).astype("float32")
    return {
        "class": classes.astype("int32"),
        "one hot": np.eye(CLASSES, dtype="float32")[classes],
        "bits": (values > 0).astype("float32"),
        "signs": np.where(values > 0, 1, -1).astype("float32"),
        "values": values,
        # Far from the predictions: the gradient of an absolute error is a sign.
        "far values": np.sign(values) * (3 + np.abs(values)),
        "labels": draw.integers(1, CLASSES, (EXAMPLES, 2)).astype("int32"),
    }[kind]


def _inputs(loss: Loss) -> np.ndarray:
    frames = (FRAMES,) if loss.targets == "labels" else ()
    shape = (EXAMPLES, *frames, FEATURES)
    return np.random.default_rng(0).normal(size=shape).astype("float32")


# Models ----------------------------------------------------------------------------


class Ending(NamedTuple):
    """The last activation of a model: of its last layer, or applied by the model."""

    activation: str | None
    applied: bool = False

    def dense(self) -> Any:
        return layers.Dense(CLASSES, None if self.applied else self.activation)

    def __call__(self, x: Any) -> Any:
        return keras.activations.get(self.activation)(x) if self.applied else x


ENDINGS = (
    Ending("softmax"),
    Ending("sigmoid"),
    Ending(None),
    Ending("softmax", applied=True),
    Ending("sigmoid", applied=True),
)


def _hidden() -> Any:
    return layers.Dense(8, "tanh")


def _sequential(shape: tuple, ending: Ending) -> Any:
    last = [layers.Activation(ending.activation)] if ending.applied else []
    return keras.Sequential([_hidden(), ending.dense(), *last])


def _functional(shape: tuple, ending: Ending) -> Any:
    inputs = keras.Input(shape)
    return keras.Model(inputs, ending(ending.dense()(_hidden()(inputs))))


class Subclassed(keras.Model):
    def __init__(self, shape: tuple, ending: Ending) -> None:
        super().__init__()
        self.hidden, self.dense, self.ending = _hidden(), ending.dense(), ending

    def call(self, x: Any) -> Any:
        return self.ending(self.dense(self.hidden(x)))


class Around(keras.Model):
    """Subclassed around a Functional model."""

    def __init__(self, shape: tuple, ending: Ending) -> None:
        super().__init__()
        inputs = keras.Input(shape)
        self.inner = keras.Model(inputs, ending.dense()(_hidden()(inputs)))
        self.ending = ending

    def call(self, x: Any) -> Any:
        return self.ending(self.inner(x))


def _nested(shape: tuple, ending: Ending) -> Any:
    """A model in a model."""
    inputs = keras.Input(shape)
    inner = keras.Model(inputs, ending.dense()(_hidden()(inputs)))
    return keras.Model(inputs, ending(inner(inputs)))


class Composed(layers.Layer):
    """A layer made of layers."""

    def __init__(self, ending: Ending) -> None:
        super().__init__()
        self.dense = ending.dense()

    def call(self, x: Any) -> Any:
        return self.dense(x)


def _composed(shape: tuple, ending: Ending) -> Any:
    inputs = keras.Input(shape)
    return keras.Model(inputs, ending(Composed(ending)(_hidden()(inputs))))


KINDS: dict[str, Callable[[tuple, Ending], Any]] = {
    "Sequential": _sequential,
    "Functional": _functional,
    "subclassed": Subclassed,
    "subclassed around Functional": Around,
    "model in a model": _nested,
    "layer made of layers": _composed,
}


# Training --------------------------------------------------------------------------


class Case(NamedTuple):
    """One entry of the table."""

    kind: str
    compiled: bool
    ending: Ending
    loss: Loss
    policy: str

    def __str__(self) -> str:
        ending = self.ending.activation or "linear"
        parts = (
            self.kind,
            "compiled" if self.compiled else "loop",
            f"{ending} applied" if self.ending.applied else ending,
            self.loss.name + (" from logits" if self.loss.options == _LOGITS else ""),
            self.policy,
        )
        return ", ".join(parts)


def cases() -> Iterator[Case]:
    """The whole table."""
    for ending in ENDINGS:
        for loss, kind, compiled, policy in itertools.product(
            LOSSES[ending.activation], KINDS, (True, False), POLICIES
        ):
            yield Case(kind, compiled, ending, loss, policy)


class Trained(NamedTuple):
    """The outcome of a few steps: a loss for each, and how the weights changed.

    Attributes:
        losses: one for each step.
        start: the weights before, one after the other.
        change: what was added to them.
    """

    losses: list[float]
    start: np.ndarray
    change: np.ndarray


def trained(case: Case) -> Trained:
    """Trains the model of a case."""
    keras.utils.set_random_seed(0)
    before = keras_mp.global_policy()
    keras_mp.set_global_policy(case.policy)
    try:
        x, y = _inputs(case.loss), _targets(case.loss.targets)
        model = KINDS[case.kind](x.shape[1:], case.ending)
        model(x)
        draw = np.random.default_rng(2)
        model.set_weights([draw.normal(size=w.shape) * 0.5 for w in model.weights])
        start = _weights(model)
        train = _fit if case.compiled else _loop
        losses = _of_applied_steps(train(model, case, x, y))
        return Trained(losses, start, _weights(model) - start)
    finally:
        keras_mp.set_global_policy(before)


def _weights(model: Any) -> np.ndarray:
    weights = [w.astype("float32").ravel() for w in model.get_weights()]
    return np.concatenate(weights)


def _of_applied_steps(steps: Iterator[tuple[Any, float]]) -> list[float]:
    """The losses of the first steps that are not skipped at a scale too high."""
    losses: list[float] = []
    for optimizer, loss in itertools.islice(steps, 2 * STEPS):
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if int(inner.iterations) > len(losses):
            losses.append(loss)
        if len(losses) == STEPS:
            return losses
    raise ValueError(f"Of {2 * STEPS} steps only {len(losses)} were applied.")


def _fit(model: Any, case: Case, x: Any, y: Any) -> Iterator[tuple[Any, float]]:
    model.compile(keras.optimizers.SGD(0.05), case.loss.object())
    while True:
        fitted = model.fit(x, y, EXAMPLES, shuffle=False, verbose=0)
        yield model.optimizer, fitted.history["loss"][0]


def _loop(model: Any, case: Case, x: Any, y: Any) -> Iterator[tuple[Any, float]]:
    optimizer = keras.optimizers.SGD(0.05)
    if case.policy == "mixed_float16":
        optimizer = keras_mp.LossScaleOptimizer(optimizer)
    if case.policy == "bfloat16":
        optimizer = keras_mp.StochasticRoundingOptimizer(optimizer, seed=0)
    x, y = keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y)
    variables = model.trainable_variables

    def loss_of(_: Any = None) -> tuple[Any, Any]:
        loss = case.loss.of(y, model(x, training=True))
        return optimizer.scale_loss(loss), loss

    while True:
        loss, grads = _gradients(loss_of, variables)
        optimizer.apply(grads, variables)
        yield optimizer, float(loss)


def _gradients(loss_of: Callable, variables: list) -> tuple[Any, list]:
    """The loss and the gradients of the scaled loss, taken as on each backend."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            scaled, loss = loss_of()
        return loss, tape.gradient(scaled, [v.value for v in variables])
    if BACKEND == "torch":
        import torch

        scaled, loss = loss_of()
        return loss.detach(), list(
            torch.autograd.grad(scaled, [v.value for v in variables])
        )
    import jax

    def stateless(values: list) -> tuple[Any, Any]:
        with keras.StatelessScope(list(zip(variables, values, strict=True))):
            return loss_of()

    grads, loss = jax.grad(stateless, has_aux=True)([v.value for v in variables])
    return loss, grads


@functools.cache
def expected(activation: str | None, name: str, logits: bool) -> Trained:
    """The same in float32: one model for all kinds, which compute the same."""
    loss = next(
        loss
        for loss in LOSSES[activation]
        if loss.name == name and (loss.options == _LOGITS) == logits
    )
    return trained(Case("Functional", True, Ending(activation), loss, "float32"))


def disagreement(case: Case) -> float:
    """How far a case is from float32; rounding explains up to 1.

    The larger of two errors: of a loss, relative to it or to 1, and of the change of
    the weights, relative to its norm. Weights in bfloat16 are themselves rounded in
    each step, so where they start and where they end is known less well.
    """
    logits = case.loss.options == _LOGITS
    wanted = expected(case.ending.activation, case.loss.name, logits)
    found = trained(case)
    a, b = np.array(found.losses), np.array(wanted.losses)
    norm = np.linalg.norm
    unit = UNIT_ROUNDOFF[case.policy]
    of_weights = 2 * norm(wanted.start) if case.policy == "bfloat16" else 0
    errors = (
        np.max(np.abs(a - b) / np.maximum(np.abs(b), 1)) / (ROUNDINGS * unit),
        norm(found.change - wanted.change)
        / (ROUNDINGS * unit * norm(wanted.change) + unit * of_weights),
    )
    # A nan is the largest error.
    return float(np.max(np.nan_to_num(errors, nan=np.inf)))


if __name__ == "__main__":
    main("endings", cases(), disagreement)
