"""What the suite `cost` measures: models, batches, how they run."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from benchmarks import BACKENDS, models


class Problem(NamedTuple):
    """What a training step needs, except for the optimizer.

    Attributes:
        model: built, in float32.
        x, y: a batch, as NumPy arrays.
        loss: (y, the model's output) -> the loss of each example: (batch,).
    """

    model: Any
    x: np.ndarray
    y: np.ndarray
    loss: Callable[[Any, Any], Any]


class Case(NamedTuple):
    """A model, and how its training step runs.

    Attributes:
        name: for `--case`.
        title: for the tables.
        backends: where it is measured.
        jit: whether the step is compiled, on TensorFlow by XLA.
        make: sizes -> the problem.
        sizes: what the suite measures.
        smallest: what the tests run.
        slow: peers that take minutes to compile or to run.
    """

    name: str
    title: str
    backends: tuple[str, ...]
    jit: bool
    make: Callable[..., Problem]
    sizes: dict[str, int]
    smallest: dict[str, int]
    slow: tuple[str, ...] = ()

    def problem(self, smallest: bool = False) -> Problem:
        """The problem, with the same weights and the same batch at each call."""
        keras.utils.set_random_seed(0)
        return self.make(**(self.smallest if smallest else self.sizes))


def _dense(batch: int, **sizes: int) -> Problem:
    x, y = _vectors(batch, sizes)
    return Problem(models.dense(**sizes), x, y, _squared_error)


def _variables(batch: int, **sizes: int) -> Problem:
    x, y = _vectors(batch, sizes)
    return Problem(models.small_variables(**sizes), x, y, _squared_error)


def _vectors(batch: int, sizes: dict[str, int]) -> np.ndarray:
    random = np.random.default_rng(0)
    return random.standard_normal((2, batch, sizes["width"])).astype("float32")


def _squared_error(y: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(y_pred - y), axis=-1)


def _transformer(batch: int, **sizes: int) -> Problem:
    random = np.random.default_rng(0)
    shape = (2, batch, sizes["length"])
    x, y = random.integers(0, sizes["vocabulary"], shape).astype("int32")
    return Problem(models.decoder(**sizes), x, y, _mean_cross_entropy)


def _mean_cross_entropy(y: Any, y_pred: Any) -> Any:
    return ops.mean(_cross_entropy(y, y_pred), axis=-1)


def _convolutions(batch: int, **sizes: int) -> Problem:
    random = np.random.default_rng(0)
    x = random.standard_normal((batch, sizes["side"], sizes["side"], 3))
    y = random.integers(0, sizes["classes"], batch).astype("int32")
    model = models.convolutions(**sizes)
    return Problem(model, x.astype("float32"), y, _cross_entropy)


def _cross_entropy(y: Any, y_pred: Any) -> Any:
    return keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)


_WIDE = dict(width=610, depth=8, batch=16)
_TRANSFORMER = dict(vocabulary=2048, length=64, width=352, depth=4, heads=4, batch=4)
_CNN = dict(side=32, filters=32, stages=3, classes=10, batch=16)


def _small(variables: int) -> dict[str, int]:
    return dict(width=16, depth=variables // 2, batch=8)


_TINY_DENSE = dict(width=4, depth=3, batch=2)
_TINY_TRANSFORMER = dict(vocabulary=8, length=4, width=8, depth=1, heads=2, batch=2)
_TINY_CNN = dict(side=8, filters=2, stages=1, classes=3, batch=2)

CASES = (
    Case("wide", "8 wide dense layers, 3 M weights", ("jax", "tensorflow"), True,
         _dense, _WIDE, _TINY_DENSE),
    Case("variables-200", "200 small variables", ("jax",), True,
         _variables, _small(200), _TINY_DENSE, slow=("flax", "jmp", "mpx")),
    Case("variables-100", "100 small variables", ("tensorflow",), True,
         _variables, _small(100), _TINY_DENSE),
    Case("transformer", "transformer, 7 M weights", BACKENDS, True,
         _transformer, _TRANSFORMER, _TINY_TRANSFORMER),
    Case("cnn", "CNN with BatchNormalization", ("jax",), True,
         _convolutions, _CNN, _TINY_CNN),
    Case("no-jit-10", "without jit, 10 variables", ("jax",), False,
         _variables, _small(10), _TINY_DENSE),
    Case("no-jit-100", "without jit, 100 variables", ("jax",), False,
         _variables, _small(100), _TINY_DENSE),
    Case("no-jit-1000", "without jit, 1000 variables", ("jax",), False,
         _variables, _small(1000), _TINY_DENSE, slow=("keras",)),
    Case("wide-no-jit", "without jit, 8 wide dense layers", ("tensorflow",), False,
         _dense, _WIDE, _TINY_DENSE),
    Case("variables-200-no-jit", "without jit, 200 variables", ("tensorflow",), False,
         _variables, _small(200), _TINY_DENSE),
)  # fmt: skip


def case_named(name: str, cases: Iterable[Case] = CASES) -> Case:
    """The case of that name; a KeyError if there is none."""
    return {case.name: case for case in cases}[name]
