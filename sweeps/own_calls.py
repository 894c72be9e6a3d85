"""Models that compute with their own inputs in `call`, in half precision.

A model's inputs stay as they are until the first layer, so float32 meets half precision
in `x + self.net(x)`, a gate, a loop. The table: {kinds of `call`} x {what is called} x
{policies}. Each case is beside the same model in float32, up to rounding; inputs that
half precision cannot hold, such as ids above 2048 and features of 1e5, are in it.

`python -m sweeps.own_calls` runs all of it on every backend; `tests/test_own_calls.py`
runs each kind and each way to call it.
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

FEATURES, EXAMPLES = 8, 16
_DRAW = np.random.default_rng(0)
X = _DRAW.normal(size=(EXAMPLES, FEATURES)).astype("float32")
LARGE = X * 1e3 + 1e5
IDS = np.resize([3.0, 257, 2049, 4097, 30001, 65521, 70000, 79999], (EXAMPLES, 1))
IDS = IDS.astype("float32")
TABLE = np.concatenate([IDS, X[:, 1:]], axis=1)
BOTH = {"ids": IDS, "x": X}
Y = np.cos(np.arange(EXAMPLES * FEATURES)).reshape(EXAMPLES, FEATURES)


def _initial(shape: Any, dtype: Any = None) -> Any:
    """The same weights under every policy, up to rounding."""
    values = np.random.default_rng(1).normal(size=shape) / shape[0] ** 0.5
    return ops.cast(values.astype("float32"), dtype or "float32")


def _dense(units: int = FEATURES, **options: Any) -> Any:
    return layers.Dense(units, kernel_initializer=_initial, **options)


def _embedding() -> Any:
    # As many rows as there are ids, and nothing like them in a row beside it.
    initial = lambda shape, dtype=None: ops.cast(  # noqa: E731
        np.sin(np.arange(shape[0] * shape[1], dtype="float64")).reshape(shape), dtype
    )
    return layers.Embedding(80000, FEATURES, embeddings_initializer=initial)


def _with_statistics() -> Any:
    return keras.Sequential([_dense(), layers.BatchNormalization(momentum=0.5)])


# Kinds -----------------------------------------------------------------------------


class Own(keras.Model):
    """A model whose `call` is a function of itself, its inputs and `training`."""

    def __init__(self, function: Callable, **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in (parts or {"d": _dense()}).items():
            setattr(self, name, part)

    def call(self, x: Any, training: Any = None) -> Any:
        return self.function(self, x, training)


class OwnWeights(keras.Model):
    """Scales its inputs by a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.d = _dense()

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(FEATURES,), initializer="ones")
        self.d.build(shape)

    def call(self, x: Any) -> Any:
        return self.d(x * self.scale) + x * self.scale


class Sines(layers.Layer):
    """In float32: its inputs are beyond half precision."""

    def __init__(self) -> None:
        super().__init__(dtype="float32")

    def call(self, x: Any) -> Any:
        return ops.sin(x)


def _native() -> tuple[Any, Any]:
    """The framework's own `matmul` and `concatenate`, which may not promote."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.matmul, tf.concat
    if BACKEND == "torch":
        import torch

        return torch.matmul, torch.cat
    import jax.numpy as jnp

    return jnp.matmul, jnp.concatenate


_matmul, _concatenate = _native()


def _reversible(m: Any, x: Any, _: Any) -> Any:
    """RevIN: normalizes its inputs, and takes that back at the end."""
    mean = ops.mean(x, -1, keepdims=True)
    centred = x - mean
    deviation = ops.sqrt(ops.mean(centred * centred, -1, keepdims=True) + 1e-5)
    return m.d(centred / deviation) * deviation + mean


def _pooled(multiply: Callable) -> Callable:
    def function(m: Any, x: Any, _: Any) -> Any:
        pairs = ops.reshape(x, (-1, FEATURES // 2, 2))
        scores = ops.transpose(m.d(pairs), (0, 2, 1))
        return m.out(ops.reshape(multiply(scores, pairs), (-1, 4)))

    return function


def _native_loop(m: Any, x: Any, _: Any) -> Any:
    if BACKEND == "torch":
        return m.d(m.d(m.d(x)))
    if BACKEND == "jax":
        import jax

        return jax.lax.fori_loop(0, 3, lambda i, h: m.d(h), x)
    import tensorflow as tf

    if not m.d.built:
        m.d.build(x.shape)
    step = lambda i, h: (i + 1, m.d(h))  # noqa: E731
    return tf.while_loop(lambda i, h: i < 3, step, (0, x), maximum_iterations=3)[1]


def _residual() -> Any:
    return Own(lambda m, x, _: x + m.d(x))


def _sliced(m: Any, x: Any, _: Any) -> Any:
    """Ids in the first column of a table of floats."""
    return m.d(m.e(x[:, 0])) + m.f(x[:, 1:]) * x[:, 1:2]


def _functional(inner: Any) -> Any:
    inputs = keras.Input((FEATURES,))
    return keras.Model(inputs, _dense()(inner(inputs)))


def _of_operators() -> Any:
    inputs = keras.Input((FEATURES,))
    return keras.Model(inputs, inputs + _dense()(inputs) * inputs)


def _in_training(m: Any, x: Any, training: Any) -> Any:
    h = m.d(x, training=training)
    return h * x if training else h


# Name -> a model, and what it is called with.
KINDS: dict[str, Callable[[], tuple[Any, Any]]] = {
    # No dtypes meet in these.
    "Functional": lambda: (_functional(_dense()), X),
    "Functional, operators": lambda: (_of_operators(), X),
    "Sequential": lambda: (keras.Sequential([_dense(), _dense()]), X),
    "layers alone": lambda: (Own(lambda m, x, _: m.d(m.d(x))), X),
    "Add": lambda: (
        Own(lambda m, x, _: m.a([x, m.d(x)]), d=_dense(), a=layers.Add()),
        X,
    ),
    "float ids": lambda: (
        Own(lambda m, x, _: m.d(m.e(x)[:, 0]), d=_dense(), e=_embedding()),
        IDS,
    ),
    "float32 layer": lambda: (
        Own(lambda m, x, _: m.d(m.s(x)), d=_dense(), s=Sines()),
        LARGE,
    ),
    "large features": lambda: (Own(lambda m, x, _: m.d(x / 1e5)), LARGE),
    "encoding": lambda: (Own(lambda m, x, _: m.d(ops.sin(x * 512.0))), X),
    # In these they do.
    "residual": lambda: (_residual(), X),
    "residual, other way": lambda: (Own(lambda m, x, _: m.d(x) + x), X),
    "gate": lambda: (Own(lambda m, x, _: m.d(x) * x), X),
    "denoiser": lambda: (Own(lambda m, x, _: x - m.d(x)), X),
    "field": lambda: (Own(lambda m, x, _: m.d(x) * x[..., 7:]), X),
    "reversible": lambda: (Own(_reversible), X),
    "reversible, large": lambda: (
        Own(lambda m, x, _: _reversible(m, x, _) / 1e5),
        LARGE,
    ),
    "layer after it": lambda: (Own(lambda m, x, _: m.d(x + m.d(x))), X),
    "comparison": lambda: (
        Own(lambda m, x, _: ops.where(m.d(x) > x - 9, m.d(x), 0)),
        X,
    ),
    "where": lambda: (Own(lambda m, x, _: ops.where(x > 0, x, m.d(x))), X),
    "stack": lambda: (Own(lambda m, x, _: ops.sum(ops.stack([x, m.d(x)]), 0)), X),
    "einsum": lambda: (
        Own(lambda m, x, _: ops.einsum("bi,bi->bi", x, m.d(x))),
        X,
    ),
    "concatenate": lambda: (
        Own(
            lambda m, x, _: m.out(_concatenate([x, m.d(x)], -1)),
            d=_dense(),
            out=_dense(),
        ),
        X,
    ),
    "matmul": lambda: (Own(_pooled(_matmul), d=_dense(2), out=_dense()), X),
    "@": lambda: (Own(_pooled(lambda a, b: a @ b), d=_dense(2), out=_dense()), X),
    "cond": lambda: (
        Own(lambda m, x, _: ops.cond(x[0, 0] < 99, lambda: m.d(x), lambda: x)),
        X,
    ),
    "loop": lambda: (
        Own(lambda m, x, _: ops.fori_loop(0, 3, lambda i, h: m.d(h), x)),
        X,
    ),
    "native loop": lambda: (Own(_native_loop), X),
    "gate of a float32 layer": lambda: (
        Own(
            lambda m, x, _: m.s(x) * m.d(x),
            d=_dense(),
            s=_dense(activation="softmax"),
        ),
        X,
    ),
    "own weights": lambda: (OwnWeights(), X),
    "dict": lambda: (
        Own(
            lambda m, x, _: m.d(m.e(x["ids"])[:, 0]) + m.f(x["x"]) * x["x"],
            d=_dense(),
            e=_embedding(),
            f=_dense(),
        ),
        BOTH,
    ),
    "list": lambda: (Own(lambda m, x, _: x[0] + m.d(x[1])), [X, X[::-1]]),
    "ids sliced": lambda: (
        Own(_sliced, d=_dense(), e=_embedding(), f=_dense()),
        TABLE,
    ),
    "float32 layer beside it": lambda: (
        Own(lambda m, x, _: m.d(m.s(x)) + x * 1e-5, d=_dense(), s=Sines()),
        LARGE,
    ),
    "in Functional": lambda: (_functional(_residual()), X),
    "in Sequential": lambda: (keras.Sequential([_residual(), _dense()]), X),
    "in subclassed": lambda: (
        Own(lambda m, x, _: m.d(m.r(x)), d=_dense(), r=_residual()),
        X,
    ),
    "round another": lambda: (Own(lambda m, x, _: x + m.r(x), r=_residual()), X),
    "statistics": lambda: (
        Own(lambda m, x, training: x + m.d(x, training=training), d=_with_statistics()),
        X,
    ),
    "in training only": lambda: (Own(_in_training, d=_with_statistics()), X),
    "activity loss": lambda: (
        Own(
            lambda m, x, _: x + m.d(x),
            d=_dense(activity_regularizer=keras.regularizers.L2(0.01)),
        ),
        X,
    ),
}


# Ways to call them -----------------------------------------------------------------


def _call(model: Any, x: Any, **options: Any) -> list[Any]:
    tensors = keras.tree.map_structure(ops.convert_to_tensor, x)
    results = [model(tensors, **options) for _ in range(2)]
    for result in results:
        dtype = keras.backend.standardize_dtype(result.dtype)
        if dtype != "float32":
            raise TypeError(f"The model returned {dtype}.")
    return [*results, *model.losses]


def _predict(model: Any, x: Any) -> list[Any]:
    return [model.predict(x, verbose=0)]


def _fit(model: Any, x: Any, **options: Any) -> list[Any]:
    model.compile(keras.optimizers.SGD(0.01), "mse", **options)
    fitted = model.fit(x, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return [np.array(fitted.history["loss"])]


def _predict_and_fit(model: Any, x: Any) -> list[Any]:
    return [*_predict(model, x), *_fit(model, x)]


WAYS: dict[str, Callable[[Any, Any], list[Any]]] = {
    "call": _call,
    "call in training": lambda model, x: _call(model, x, training=True),
    "predict": _predict,
    "fit": lambda model, x: _fit(model, x, jit_compile=BACKEND == "jax"),
    "fit eagerly": lambda model, x: _fit(model, x, run_eagerly=True),
    "fit compiled": lambda model, x: _fit(model, x, jit_compile=True),
    "predict, then fit": _predict_and_fit,
}
if BACKEND == "torch":  # Its own compiler takes half a minute for each.
    del WAYS["fit compiled"]


# XLA on TensorFlow has no gradient of a loop without bounds, and a weight in the model
# itself is a tracer where Keras on JAX runs eagerly.
NOT_IN_FLOAT32 = {
    ("tensorflow", "loop", "fit compiled"),
    ("jax", "own weights", "fit eagerly"),
}


class Case(NamedTuple):
    """One entry of the table."""

    kind: str
    way: str
    policy: str

    def __str__(self) -> str:
        return ", ".join(self)


def cases() -> Iterator[Case]:
    """The whole table, but for what the backend cannot run in float32 either."""
    for case in itertools.starmap(Case, itertools.product(KINDS, WAYS, POLICIES)):
        if (BACKEND, case.kind, case.way) not in NOT_IN_FLOAT32:
            yield case


def computed(case: Case) -> list[np.ndarray]:
    """What a case computes, and the statistics that it leaves."""
    keras.utils.set_random_seed(0)
    before = keras_mp.global_policy()
    keras_mp.set_global_policy(case.policy)
    try:
        model, x = KINDS[case.kind]()
        results = WAYS[case.way](model, x)
        names = ("moving_mean", "moving_variance")
        results += [v for v in model.variables if v.path.endswith(names)]
        return [ops.convert_to_numpy(ops.cast(result, "float32")) for result in results]
    finally:
        keras_mp.set_global_policy(before)


def disagreement(case: Case) -> float:
    """How far a case is from float32; rounding explains up to 1.

    The largest error of an element, relative to the largest element beside it.
    """
    unit = ROUNDINGS * UNIT_ROUNDOFF[case.policy]
    expected = computed(case._replace(policy="float32"))
    errors = [
        np.max(np.abs(found - wanted)) / (unit * max(np.max(np.abs(wanted)), 1e-3))
        for found, wanted in zip(computed(case), expected, strict=True)
    ]
    return float(np.max(np.nan_to_num(errors, nan=np.inf)))


if __name__ == "__main__":
    main("own_calls", cases(), disagreement)
