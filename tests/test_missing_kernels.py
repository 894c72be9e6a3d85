"""Layers of the user's whose operations have no half precision: a step finds them.

Of the table in `sweeps/missing_kernels.py` each operation is called by one caller in
one way, and one operation by every caller, and in every way.
"""

import itertools

import keras
import numpy as np
import pytest
from backends import BACKEND, POLICIES, told, values
from keras import layers, ops

import keras_mp
from keras_mp.backends import engine
from keras_mp.policies import missing_kernels, mixed_dtypes
from sweeps.missing_kernels import (
    CALLERS,
    NOT_IN_FLOAT32,
    OPERATIONS,
    WAYS,
    Case,
    Operation,
    X,
    Y,
    cases,
    disagreement,
)
from sweeps.missing_kernels import POLICIES as ALL_POLICIES

EVERY_WAY = [*itertools.product(CALLERS, WAYS, ALL_POLICIES)]
SPREAD = itertools.cycle(EVERY_WAY[:: len(CALLERS) + 2])
CHOSEN = [
    *(Case(name, *way) for name, way in zip(OPERATIONS, SPREAD, strict=False)),
    *(Case("svd", caller, "fit", "mixed_float16") for caller in CALLERS),
    *(
        Case("svd", "functional", way, policy)
        for way in WAYS
        for policy in ALL_POLICIES
    ),
]
IN_TABLE = {*cases()}
# Every backend has a kernel that is missing in each of these.
MISSED = ["mixed_float16"] if BACKEND == "tensorflow" else list(POLICIES)


@pytest.mark.parametrize("case", [c for c in CHOSEN if c in IN_TABLE], ids=str)
@pytest.mark.filterwarnings("ignore:.*mixes dtypes")
@pytest.mark.sampled
def test_a_model_with_it_trains_as_in_float32(case):
    assert disagreement(case) < 1


def fit(model, **options):
    options = {"batch_size": 4, "shuffle": False, "verbose": 0, **options}
    return model.fit(X, Y, **options)


def model_of(*made, loss="mse", **options):
    inputs = keras.Input((16,))
    x = layers.Reshape((4, 4))(layers.Dense(16, name="first")(inputs))
    for layer in made:
        x = layer(x)
    outputs = layers.Dense(1, name="last")(layers.Flatten()(x))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(1e-3), loss, **options)
    return model


def dtypes_of(model):
    return {layer.name: layer.compute_dtype for layer in model._flatten_layers()}


@pytest.mark.parametrize("half", MISSED)
def test_the_layer_is_named_once_and_the_others_stay_in_half_precision(half):
    keras_mp.set_global_policy(half)
    model = model_of(layers.Dense(4, name="hidden"), Operation("svd", name="svd"))
    _, (message,) = told(lambda: fit(model, epochs=2))
    assert message.startswith(
        "svd mixes dtypes in half precision, or calls what lacks it, and computes in"
    )
    dtypes = dtypes_of(model)
    assert (
        dtypes["svd"] == "float32" and model.get_layer("svd").output.dtype == "float32"
    )
    assert dtypes["first"] == dtypes["hidden"] == POLICIES[half]
    assert int(model.optimizer.iterations) == 4
    _, messages = told(lambda: (fit(model), model.predict(X, verbose=0)))
    assert messages == []


@pytest.mark.parametrize("half", MISSED)
def test_each_of_several_is_named(half):
    keras_mp.set_global_policy(half)
    model = model_of(
        Operation("cholesky", name="cholesky"),
        layers.Dense(4, name="between"),
        Operation("solve", name="solve"),
    )
    _, messages = told(lambda: fit(model))
    assert sorted(message.split()[0] for message in messages) == ["cholesky", "solve"]
    assert dtypes_of(model)["between"] == POLICIES[half]
    assert int(model.optimizer.iterations) == 2


@pytest.mark.parametrize("half", MISSED)
@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.filterwarnings("ignore:.*mixes dtypes")
def test_the_failed_step_leaves_no_trace(half, eagerly):
    def trained(**options):
        keras.utils.set_random_seed(0)
        model = model_of(
            layers.BatchNormalization(),
            layers.Dropout(0.5, seed=1),
            Operation("svd", name="svd", **options),
            metrics=["mae"],
            run_eagerly=eagerly and BACKEND != "torch",
        )
        history = fit(model, epochs=2).history
        return history, values(model.variables)

    keras_mp.set_global_policy(half)
    found, wanted = trained(), trained(dtype="float32")
    assert found[0] == wanted[0]
    for value, expected in zip(found[1], wanted[1], strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("half", MISSED)
@pytest.mark.filterwarnings("ignore:.*mixes dtypes")
def test_a_file_of_the_model_says_so(half, tmp_path):
    keras_mp.set_global_policy(half)
    model = model_of(Operation("svd", name="svd"))
    fit(model)
    model.save(tmp_path / "model.keras")
    opened = keras.saving.load_model(tmp_path / "model.keras")
    _, messages = told(lambda: fit(opened))
    assert messages == [] and dtypes_of(opened)["svd"] == "float32"


class Counting(layers.Layer):
    """Has a state, which a second call of the layer would move on again."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        return ops.svd(x)[1]

    def compute_output_shape(self, shape):
        return shape[:-1]


@pytest.mark.parametrize("half", MISSED)
@pytest.mark.filterwarnings("ignore:.*mixes dtypes")
def test_a_layer_with_state_counts_its_steps(half):
    keras_mp.set_global_policy(half)
    counting = Counting(name="counting")
    fit(model_of(counting), epochs=3)
    assert float(counting.calls.value) == 6 and counting.compute_dtype == "float32"


class Failing(layers.Layer):
    def call(self, x):
        raise TypeError(f"dtype {x.dtype} is no good")

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


class Shapeless(Failing):
    def call(self, x):
        raise ValueError("the shapes are no good")


@pytest.mark.parametrize("layer_class", [Failing, Shapeless])
def test_what_fails_in_float32_as_well_or_for_something_else_fails(layer_class):
    keras_mp.set_global_policy("mixed_float16")
    model = model_of(layer_class(name="bad"))
    before = dtypes_of(model)
    # On torch Keras turns what its own attempt to build raises into another error.
    with pytest.raises((TypeError, ValueError, RuntimeError), match="no good"):
        told(lambda: fit(model))
    assert dtypes_of(model) == before
    assert all(np.isfinite(value).all() for value in values(model.weights))


def test_an_interrupt_of_the_search_changes_nothing(monkeypatch):
    keras_mp.set_global_policy("mixed_float16")
    model = model_of(Operation("svd", name="svd"))
    before = dtypes_of(model)

    def interrupted(layer):
        if layer.compute_dtype == "float32":
            raise KeyboardInterrupt
        return True

    monkeypatch.setattr(missing_kernels, "_fails", interrupted)
    monkeypatch.setattr(mixed_dtypes, "may_be_kept", lambda layer: layer.name == "svd")
    with pytest.raises(KeyboardInterrupt):
        missing_kernels.mended(model, TypeError("float16"))
    assert dtypes_of(model) == before


def test_a_model_without_layers_of_the_user_takes_its_first_step_as_ever(monkeypatch):
    monkeypatch.setattr(missing_kernels, "mended", None)
    reads = []
    read = type(engine).run_by_batch
    monkeypatch.setattr(
        type(engine),
        "run_by_batch",
        lambda *args: reads.append(args) or read(*args),
    )
    keras_mp.set_global_policy("mixed_bfloat16")
    fit(model_of(layers.Dense(4)))
    assert reads == []


def test_the_table_names_what_float32_cannot_do():
    assert {operation for _, operation in NOT_IN_FLOAT32} <= {*OPERATIONS}


def evaluated(model):
    return [model.evaluate(X, Y, batch_size=4, verbose=0)]


def predicted(model):
    return [model.predict(X, batch_size=4, verbose=0)]


USES = {
    "evaluate": evaluated,
    "predict": predicted,
    "test_on_batch": lambda model: [model.test_on_batch(X, Y)],
    "predict_on_batch": lambda model: [model.predict_on_batch(X)],
    "call": lambda model: [ops.convert_to_numpy(ops.stop_gradient(model(X)))],
}


@pytest.mark.parametrize("steps", [1] if BACKEND == "torch" else [1, 3])
@pytest.mark.parametrize("caller", ["functional", "subclassed", "own call"])
@pytest.mark.parametrize("use", USES)
@pytest.mark.sampled
def test_a_model_that_is_converted_is_used_before_it_trains(use, caller, steps):
    model = CALLERS[caller]("svd")
    model.compile("sgd", "mse", steps_per_execution=steps)
    wanted = USES[use](model)
    keras_mp.convert(model, "mixed_float16")
    found, messages = told(lambda: USES[use](model))
    np.testing.assert_allclose(found[0], wanted[0], rtol=0.02, atol=0.02)
    assert len(messages) == 1
    _, again = told(lambda: USES[use](model))
    assert again == [] and len(values(model.optimizer.variables)) > 0
