"""Operations without half-precision kernels in layers of the user's, under training.

Linear algebra and Fourier transforms: no backend has all of them in half precision, nor
all of their gradients, and which are missing shows when a step is compiled or runs. The
table: {operations} x {who calls them} x {how a step is taken} x {policies}. Each case
is beside the same model in float32, up to rounding.

`python -m sweeps.missing_kernels` runs all of it on every backend;
`tests/test_missing_kernels.py` runs each operation, each caller and each way.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers, ops

import keras_mp
from sweeps.endings import POLICIES, ROUNDINGS, UNIT_ROUNDOFF
from sweeps.table import BACKEND, main

SIZE, EXAMPLES, BATCH = 4, 8, 4
_DRAW = np.random.default_rng(0)
X = _DRAW.normal(size=(EXAMPLES, SIZE * SIZE)).astype("float32")
Y = np.cos(np.arange(EXAMPLES)).reshape(EXAMPLES, 1).astype("float32")


def _positive(x: Any) -> Any:
    """Symmetric matrices whose eigenvalues are 2 or more, and apart."""
    diagonal = np.diag(2.0 + np.arange(SIZE)).astype("float32")
    return ops.matmul(x, ops.swapaxes(x, 1, 2)) / SIZE + ops.cast(diagonal, x.dtype)


def _spectrum(transform: Callable) -> Callable[[Any], Any]:
    return lambda x: transform((x, ops.zeros_like(x)))[0]


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "cholesky": lambda x: ops.cholesky(_positive(x)),
    "cholesky_inverse": lambda x: ops.cholesky_inverse(_positive(x)),
    "det": lambda x: ops.det(_positive(x))[:, None] / 100,
    "eigh": lambda x: ops.eigh(_positive(x))[0],
    "fft": _spectrum(ops.fft),
    "fft2": _spectrum(ops.fft2),
    "i0": lambda x: ops.i0(x),
    "ifft2": _spectrum(ops.ifft2),
    "inv": lambda x: ops.inv(_positive(x)),
    "irfft": lambda x: ops.irfft((x, x)),
    "logdet": lambda x: ops.logdet(_positive(x))[:, None],
    "lstsq": lambda x: ops.lstsq(_positive(x)[0], x[0])[None] + x,
    "lu_factor": lambda x: ops.lu_factor(_positive(x))[0],
    "norm of matrices": lambda x: ops.norm(_positive(x), ord=2, axis=(1, 2))[:, None],
    "pinv": lambda x: ops.pinv(_positive(x)),
    "qr": lambda x: ops.qr(_positive(x))[1],
    "rfft": lambda x: sum(ops.rfft(x)),
    "slogdet": lambda x: ops.slogdet(_positive(x))[1][:, None],
    "solve": lambda x: ops.solve(_positive(x), x),
    "solve_triangular": lambda x: ops.solve_triangular(_positive(x), x, lower=True),
    "stft": lambda x: sum(ops.stft(ops.reshape(x, (-1, SIZE * SIZE)), 8, 4, 8)),
    "svd": lambda x: ops.svd(_positive(x))[1],
}
OPERATIONS = {
    name: operation
    for name, operation in OPERATIONS.items()
    if hasattr(ops, name) or " " in name  # Older versions of Keras have fewer.
}


@keras.saving.register_keras_serializable("sweeps")
class Operation(layers.Layer):
    """A layer of the user's."""

    def __init__(self, operation: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.operation = operation

    def call(self, x: Any) -> Any:
        return OPERATIONS[self.operation](x)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "operation": self.operation}


class Block(layers.Layer):
    """A layer of the user's made of one of theirs and some of Keras'."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        self.dense = _dense(SIZE)
        self.operation = Operation(operation)

    def call(self, x: Any) -> Any:
        return self.operation(x + self.dense(x))


class Subclassed(keras.Model):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.first, self.made = _first(), make()
        self.last = _last()

    def call(self, x: Any) -> Any:
        return self.last(self.made(self.first(x)))


class OwnCall(keras.Model):
    """A model that calls the operation itself."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        self.first, self.last, self.operation = _first(), _last(), operation

    def call(self, x: Any) -> Any:
        return self.last(OPERATIONS[self.operation](self.first(x)))


def _initial(shape: Any, dtype: Any = None) -> Any:
    """The same weights under every policy, up to rounding."""
    values = np.random.default_rng(1).normal(size=shape) / shape[0] ** 0.5
    return ops.cast(values.astype("float32"), dtype or "float32")


def _dense(units: int) -> Any:
    return layers.Dense(units, kernel_initializer=_initial)


def _first() -> Any:
    return keras.Sequential([_dense(SIZE * SIZE), layers.Reshape((SIZE, SIZE))])


def _last() -> Any:
    return keras.Sequential([layers.Flatten(), _dense(1)])


def _functional(make: Callable[[], Any]) -> Any:
    inputs = keras.Input((SIZE * SIZE,))
    return keras.Model(inputs, _last()(make()(_first()(inputs))))


CALLERS: dict[str, Callable[[str], Any]] = {
    "functional": lambda name: _functional(lambda: Operation(name)),
    "subclassed": lambda name: Subclassed(lambda: Operation(name)),
    "lambda": lambda name: _functional(lambda: layers.Lambda(OPERATIONS[name])),
    "block": lambda name: _functional(lambda: Block(name)),
    "own call": OwnCall,
}


def _fit(**options: Any) -> Callable[[Any], list[Any]]:
    def fit(model: Any) -> list[Any]:
        model.compile(keras.optimizers.SGD(1e-3), "mse", **options)
        history = model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        return [*history.history["loss"], model.predict(X, verbose=0)]

    return fit


def _on_batches(model: Any) -> list[Any]:
    model.compile(keras.optimizers.SGD(1e-3), "mse")
    return [model.train_on_batch(X, Y) for _ in range(2)]


WAYS: dict[str, Callable[[Any], list[Any]]] = {
    "fit": _fit(),
    "train_on_batch": _on_batches,
}
if BACKEND != "torch":
    WAYS["fit eagerly"] = _fit(run_eagerly=True)
    WAYS["fit, two steps at once"] = _fit(steps_per_execution=2)
# What the backend cannot train in float32 either.
NOT_IN_FLOAT32 = {("jax", "cholesky_inverse"), ("tensorflow", "lu_factor")}


class Case(NamedTuple):
    operation: str
    caller: str
    way: str
    policy: str

    def __str__(self) -> str:
        return f"{self.operation} in {self.caller}: {self.way}, {self.policy}"


def cases() -> Iterator[Case]:
    """The whole table, but for what the backend cannot run in float32 either."""
    table = itertools.product(OPERATIONS, CALLERS, WAYS, POLICIES)
    for case in itertools.starmap(Case, table):
        if (BACKEND, case.operation) not in NOT_IN_FLOAT32:
            yield case


def computed(case: Case) -> list[Any]:
    """The losses and predictions of a case."""
    keras.utils.set_random_seed(0)
    before = keras_mp.global_policy()
    keras_mp.set_global_policy(case.policy)
    try:
        return WAYS[case.way](CALLERS[case.caller](case.operation))
    finally:
        keras_mp.set_global_policy(before)


def disagreement(case: Case) -> float:
    """How far a case is from float32; rounding explains up to 1."""
    unit = ROUNDINGS * UNIT_ROUNDOFF[case.policy]
    expected = computed(case._replace(policy="float32"))
    errors = [
        np.max(np.abs(found - wanted)) / (unit * np.max(np.abs(wanted)))
        for found, wanted in zip(computed(case), expected, strict=True)
    ]
    return float(np.max(np.nan_to_num(errors, nan=np.inf)))


if __name__ == "__main__":
    main("missing_kernels", cases(), disagreement)
