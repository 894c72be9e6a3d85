"""Models that mix dtypes in their own `call`: `sweeps/own_calls.py`, and the rest.

Of its table, each kind is called in one way, and two kinds in every way.
"""

import contextlib
import itertools
import threading

import keras
import numpy as np
import pytest
from backends import BACKEND, POLICIES, dtype_of, told, values
from keras import ops
from products import products_of

import keras_mp
from keras_mp.policies import own_calls
from keras_mp.policies.record import records
from sweeps.own_calls import KINDS, WAYS, Case, X, Y, cases, disagreement
from sweeps.own_calls import POLICIES as ALL_POLICIES

EVERY_WAY = [*itertools.product(WAYS, ALL_POLICIES)]
CHOSEN = [
    *(Case(k, *way) for k, way in zip(KINDS, itertools.cycle(EVERY_WAY), strict=False)),
    *(Case(k, *way) for k in ("residual", "statistics") for way in EVERY_WAY),
]
IN_TABLE = {*cases()}
CASES = [case for case in CHOSEN if case in IN_TABLE]
layers = keras.layers
# TensorFlow alone does not promote: there these models fail without keras_mp.
does_not_promote = pytest.mark.skipif(
    BACKEND != "tensorflow", reason="JAX and torch promote, so nothing fails there"
)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.filterwarnings("ignore:.*mixes dtypes")
@pytest.mark.sampled
def test_a_model_that_uses_its_own_inputs_computes_as_in_float32(case):
    assert disagreement(case) < 1


class Residual(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.calls = 0
        self.first, self.second = layers.Dense(8), layers.Dense(8)

    def build(self, shape):
        self.first.build(shape)
        self.second.build(shape)

    def call(self, x):
        self.calls += 1
        return x + self.second(self.first(x))

    def get_config(self):
        return super().get_config()


@does_not_promote
@pytest.mark.parametrize("half", POLICIES)
def test_the_layers_stay_in_half_precision_and_the_model_is_told_once(half):
    keras_mp.set_global_policy(half)
    model = Residual(name="residual")
    result, (message,) = told(lambda: model(X))
    assert message.startswith("The `call` of residual mixes dtypes")
    assert dtype_of(result) == "float32"
    dtypes = [layer.compute_dtype for layer in (model, model.first, model.second)]
    assert dtypes == ["float32", POLICIES[half], POLICIES[half]]
    assert dtype_of(model.first(X)) == POLICIES[half]
    (row,) = [r for r in keras_mp.inspect(model).layers if r.path == "residual"]
    assert "mixes dtypes" in str(row)

    model.compile("sgd", "mse")
    _, said = told(lambda: model.fit(X, Y, verbose=0))
    assert said == []
    # Two products forward, two for the kernels and one for the first layer's result.
    assert products_of(model, X, Y) == {POLICIES[half]: 5}


def test_a_model_that_mixes_nothing_is_called_as_often_as_before(monkeypatch):
    class Plain(Residual):
        def call(self, x):
            self.calls += 1
            return self.second(self.first(x))

    def calls(policy):
        keras_mp.set_global_policy(policy)
        model = Plain()
        model(X)
        model.compile("sgd", "mse")
        model.fit(X, Y, verbose=0)
        return model.calls

    mending = calls("mixed_float16"), calls("mixed_bfloat16")
    monkeypatch.setattr(own_calls, "mended", lambda layer: contextlib.nullcontext())
    assert mending == (calls("mixed_float16"), calls("mixed_bfloat16"))


@does_not_promote
def test_what_the_failed_call_has_changed_is_put_back(mixed_float16):
    class Counting(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(8, activity_regularizer="l2")
            self.norm = layers.BatchNormalization()

        def build(self, shape):
            self.dense.build(shape)
            self.norm.build(shape)
            tenth = keras.initializers.Constant(0.1)  # In half precision it is another.
            self.count = self.add_weight((), tenth, trainable=False)

        def call(self, x, training=None):
            self.count.assign_add(1.0)
            return x + self.norm(self.dense(x), training=training)

    def state():
        keras.utils.set_random_seed(0)
        model = Counting()
        told(lambda: model(X, training=True))
        assert float(model.count) == np.float32(0.1) + np.float32(1)
        return [*values(model.non_trainable_variables), *values(model.losses)]

    found = state()
    keras_mp.set_global_policy("float32")
    for value, wanted in zip(found, state(), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=0.01, atol=1e-3)


def attributes(model):
    record = records[id(model)]
    names = ("decision", "keeps_input_dtypes", "mixes")
    return sorted(vars(model)), model.dtype_policy, [getattr(record, n) for n in names]


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        ([ValueError, ValueError], ValueError),
        ([ValueError, KeyError], ValueError),
        ([ValueError, KeyboardInterrupt], KeyboardInterrupt),
        ([KeyError], KeyError),  # No framework raises this for dtypes.
        ([KeyboardInterrupt], KeyboardInterrupt),
    ],
)
def test_an_error_that_float32_does_not_mend_changes_nothing(
    raised, told, mixed_float16
):
    class Wrong(Residual):
        def call(self, x):
            h = self.first(x)
            if errors:
                raise errors.pop(0)("dtype or not, this model is wrong")
            return h

    errors = []
    model = Wrong()
    model(X)
    before = attributes(model)
    errors += raised
    model.dtype_policy = model.dtype_policy.__class__.from_config(
        model.dtype_policy.get_config()
    )  # The next call is a first one.
    with pytest.raises(told, match="this model is wrong"):
        model(X)
    assert attributes(model) == before and errors == []
    assert not own_calls.under_way
    assert dtype_of(model(X)) == "float32"


@does_not_promote
@pytest.mark.usefixtures("installed")
def test_under_keras_own_policy_it_works_as_well():
    """There Keras would cast the inputs, and we keep them."""
    keras.config.set_dtype_policy("mixed_float16")
    model = Residual()
    result, said = told(lambda: model(X))
    assert dtype_of(result) == "float32" and len(said) == 1
    assert model.first.compute_dtype == "float16"


@pytest.mark.filterwarnings("ignore:.*mixes dtypes")
def test_threads_may_call_such_a_model_first_at_the_same_time(mixed_float16):
    model = Residual()
    model.build(X.shape)  # Keras builds no model in two threads.
    barrier, results = threading.Barrier(4), []

    def call():
        barrier.wait()
        results.append(ops.convert_to_numpy(model(X)))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert "call" not in vars(model) and not own_calls.under_way


@does_not_promote
def test_a_converted_model_computes_in_one_precision_and_mixes_again(mixed_float16):
    model = Residual()
    expected, _ = told(lambda: np.asarray(model(X)))
    keras_mp.convert(model, "float32")
    assert {x.compute_dtype for x in model._flatten_layers()} == {"float32"}
    np.testing.assert_allclose(np.asarray(model(X)), expected, rtol=0.01, atol=0.01)
    keras_mp.convert(model, "mixed_float16")
    again, _ = told(lambda: np.asarray(model(X)))
    np.testing.assert_array_equal(again, expected)
    assert model.first.compute_dtype == "float16"


@does_not_promote
def test_such_a_model_is_saved_and_trains_on(mixed_float16, tmp_path):
    model = Residual()
    model.compile(keras.optimizers.SGD(0.01), "mse")
    told(lambda: model.fit(X, Y, epochs=2, verbose=0))
    model.save(tmp_path / "model.keras")
    reopened = keras.models.load_model(
        tmp_path / "model.keras", custom_objects={"Residual": Residual}
    )
    results = [told(lambda m=m: m.predict(X, verbose=0))[0] for m in (model, reopened)]
    np.testing.assert_array_equal(*results)
    both = [told(lambda m=m: m.fit(X, Y, verbose=0))[0] for m in (model, reopened)]
    first, second = (fit.history["loss"] for fit in both)
    assert first == second
    assert reopened.first.compute_dtype == "float16"


@does_not_promote
def test_a_loop_of_the_users_own_differentiates_such_a_model(mixed_float16):
    import tensorflow as tf

    def gradients(model, run):
        def taken():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(X, training=True) - Y) ** 2)
            return tape.gradient(loss, [w.value for w in model.trainable_weights])

        return told(lambda: run(taken)())[0]

    keras.utils.set_random_seed(0)
    model = Residual()
    eager = gradients(model, lambda f: f)
    for run in (tf.function, lambda f: tf.function(f, jit_compile=True)):
        for a, b in zip(gradients(model, run), eager, strict=True):
            np.testing.assert_allclose(a, b, rtol=0.01, atol=1e-3)


@pytest.mark.once("It reads a table.")
def test_the_kinds_hold_inputs_that_half_precision_cannot():
    largest = [
        np.max(np.abs(x))
        for kind in KINDS.values()
        for x in keras.tree.flatten(kind()[1])
    ]
    assert sum(value > 65504 for value in largest) >= 7
