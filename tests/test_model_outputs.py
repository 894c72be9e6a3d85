"""What the outermost call of a model returns is float32."""

import gc

import keras
import numpy as np
import pytest
from backends import BACKEND, computes, dtype_of
from keras import layers, ops
from products import products_of

import keras_mp
from keras_mp.backends.leaves import leaves

X, Y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")


class Net(keras.Model):
    """A subclassed model, which notes the dtype that its inner model returns."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = keras.Sequential([layers.Dense(3)])
        self.head = layers.Dense(1)
        self.seen = []

    def call(self, x):
        x = self.inner(x)
        self.seen.append(dtype_of(x))
        return {"y": self.head(x), "hidden": x, "count": ops.ones((2,), "int32")}


class Regression(Net):
    def call(self, x):
        return super().call(x)["y"]


def functional():
    inputs = keras.Input((2,))
    return keras.Model(inputs, layers.Dense(1)(layers.Dense(3)(inputs)))


def sequential():
    return keras.Sequential([layers.Dense(3), layers.Dense(1)])


def test_a_subclassed_model_returns_float32_and_its_inner_models_do_not(half):
    model = Net()
    outputs = model(X)
    assert {k: dtype_of(v) for k, v in outputs.items()} == {
        "y": "float32",
        "hidden": "float32",
        "count": "int32",
    }
    assert set(model.seen) == {half} and model.head.compute_dtype == half
    assert model.predict(X, verbose=0)["y"].dtype == "float32"
    with pytest.raises(Exception):  # noqa: B017 (each backend has its own)
        model(np.ones((4, 5), "float32"))
    # A call that failed leaves the next one outermost.
    assert dtype_of(model(X)["y"]) == "float32"


@pytest.mark.parametrize("make", [functional, sequential])
def test_a_model_that_was_never_compiled_returns_float32(make, half):
    model = make()
    assert dtype_of(model(X)) == "float32"
    assert model.predict(X, verbose=0).dtype == "float32"
    assert {layer.compute_dtype for layer in model.layers[-2:]} == {half}


@pytest.mark.skipif(BACKEND == "tensorflow", reason="Keras: not on TensorFlow")
def test_a_stateless_call_returns_float32(half):
    model = Net()
    model(X)
    model.seen.clear()
    variables = model.trainable_variables, model.non_trainable_variables
    values = [[v.value for v in group] for group in variables]
    outputs, _ = model.stateless_call(*values, ops.convert_to_tensor(X))
    assert dtype_of(outputs["y"]) == "float32" and model.seen == [half]
    assert dtype_of(model(X)["y"]) == "float32"  # And the call after it.


def test_a_functional_model_with_a_call_of_its_own_returns_float32(half):
    class Features(keras.Model):
        def __init__(self):
            inputs = keras.Input((2,))
            super().__init__(inputs, layers.Dense(3)(inputs))

        def call(self, x):
            y = super().call(x)
            return {"y": y, "twice": y * 2}

    assert {dtype_of(x) for x in Features()(X).values()} == {"float32"}


def test_symbolic_calls_stay_as_they_are(half):
    model = functional()
    assert model.output.dtype == model(keras.Input((2,))).dtype == half
    outer = keras.Model(model.input, layers.Dense(1)(model(model.input)))
    assert outer.layers[1].output.dtype == half


def with_a_layer_of_keras_policy():
    inputs = keras.Input((2,))
    hidden = layers.Dense(3)(inputs)
    users = layers.Dense(1, dtype="mixed_float16")(hidden)
    return keras.Model(inputs, {"ours": layers.Dense(1)(hidden), "users": users})


def nested():
    return keras.Sequential([functional(), keras.Sequential([layers.Dense(2)])])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        functional,
        sequential,
        nested,
        Net,
        Regression,
        with_a_layer_of_keras_policy,
    ],
)
def test_a_spec_says_what_a_call_returns(make, compiled, half):
    model = make()
    model(X)
    if compiled:
        model.compile("sgd", "mse")
    spec = model.compute_output_spec(keras.KerasTensor((4, 2)))
    said = keras.tree.map_structure(lambda x: (x.shape, x.dtype), spec)
    found = keras.tree.map_structure(lambda x: (x.shape, dtype_of(x)), model(X))
    assert said == found
    assert "float32" in str(found)


def test_a_spec_of_an_inner_model_is_what_the_inner_model_returns(half):
    outer = keras.Sequential([functional(), layers.Dense(2)])
    specs = []
    inner = outer.layers[0]
    spec_of = inner.compute_output_spec
    inner.compute_output_spec = lambda *args, **kwargs: (
        specs.append(spec_of(*args, **kwargs)) or specs[-1]
    )
    outer.compute_output_spec(keras.KerasTensor((4, 2)))
    assert [spec.dtype for spec in specs] == [half]


def test_what_is_computed_stays_half(half):
    if (BACKEND, half) == ("torch", "float16"):
        pytest.skip("Keras on torch multiplies float16 in float32 on CPUs")
    model = Regression()
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    # Before the layer whose output the model returns: a small head is float32.
    assert products_of(model, X, Y) == {half: 2, "float32": 3}


def test_a_mask_goes_on(half):
    model = keras.Sequential([layers.Masking(), layers.Dense(2)])
    outputs = model(np.zeros((1, 2, 2), "float32"))
    mask = keras_mp.keras_private.get_keras_mask(outputs)
    assert ops.convert_to_numpy(mask).tolist() == [[False, False]]


@pytest.mark.parametrize("way", ["argument", "attribute"])
def test_a_subclassed_model_says_no_with_a_policy_of_keras(way):
    keras_mp.set_global_policy("mixed_float16")
    model = Net(**({"dtype": "mixed_float16"} if way == "argument" else {}))
    if way == "attribute":
        model.dtype_policy = "mixed_float16"
    assert dtype_of(model(X)["y"]) == "float16"


@pytest.mark.parametrize("compiled", [False, True])
def test_the_output_layer_of_a_graph_says_no_with_a_dtype_of_keras(compiled):
    keras_mp.set_global_policy("mixed_float16")
    inputs = keras.Input((2,))
    hidden = layers.Dense(3)(inputs)
    ours, users = layers.Dense(1), layers.Dense(1, dtype="mixed_float16")
    model = keras.Model(inputs, [ours(hidden), users(hidden)])
    if compiled:
        model.compile("sgd", ["mse", "mse"])
    assert [dtype_of(x) for x in model(X)] == ["float32", "float16"]


def test_models_of_keras_own_policies_return_what_they_return_in_keras():
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert dtype_of(functional()(X)) == dtype_of(Net()(X)["y"]) == "bfloat16"


def test_a_converted_model_returns_float32_before_and_after():
    model = Net()
    model(X)
    for policy in ("mixed_float16", "float32", "mixed_bfloat16"):
        keras_mp.convert(model, policy)
        assert dtype_of(model(X)["y"]) == "float32"


# Outputs with logits --------------------------------------------------------------


class Around(keras.Model):
    """A subclassed model of a layer or a model, and an activation in its `call`."""

    def __init__(self, inner, activation=None):
        super().__init__()
        self.inner = inner
        self.after = keras.activations.get(activation)

    def call(self, x):
        return self.after(self.inner(x))


def graph(layer):
    inputs = keras.Input((2,))
    return keras.Model(inputs, layer(inputs))


def sigmoid():
    return layers.Dense(1, activation="sigmoid")


SIGMOIDS = {
    "of a layer": lambda: Around(sigmoid()),
    "in call": lambda: Around(layers.Dense(1), "sigmoid"),
    "of a model within": lambda: Around(graph(sigmoid())),
    "sequential": lambda: keras.Sequential([sigmoid()]),
}


@pytest.mark.parametrize("loss", ["binary_crossentropy", "binary_focal_crossentropy"])
@pytest.mark.parametrize("make", SIGMOIDS.values(), ids=SIGMOIDS)
@pytest.mark.sampled
def test_models_that_end_in_a_sigmoid_train_as_in_float32(make, loss, half):
    x = np.random.default_rng(0).normal(size=(8, 2)).astype("float32")
    y = (x[:, :1] > 0).astype("float32")
    losses = {}
    for policy in ("float32", half):
        keras.utils.set_random_seed(0)
        keras_mp.set_global_policy(f"mixed_{half}" if policy == half else policy)
        model = make()
        model.compile("sgd", loss)
        fitted = model.fit(x, y, epochs=3, shuffle=False, verbose=0)
        losses[policy] = fitted.history["loss"]
    np.testing.assert_allclose(losses[half], losses["float32"], rtol=0.02)


@pytest.mark.parametrize("make", SIGMOIDS.values(), ids=SIGMOIDS)
def test_losses_take_what_a_model_that_was_never_compiled_returns(make, half):
    predicted = make()(X)
    assert dtype_of(keras.losses.binary_crossentropy(Y, predicted)) == "float32"
    assert dtype_of(keras.losses.BinaryCrossentropy()(Y, predicted)) == "float32"


# Outputs that are no heads --------------------------------------------------------


class Block(layers.Layer):
    """Of a transformer: layers, a norm, and attention."""

    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 4)
        self.norm = layers.LayerNormalization()

    def call(self, x):
        return self.norm(x + self.attention(x, x))


def gpt():
    inputs = keras.Input((5,), dtype="int32")
    x = Block()(layers.Embedding(7, 8)(inputs))
    return keras.Model(inputs, [layers.Dense(7)(x), x])


def test_a_block_that_is_an_output_stays_half_in_all_its_parts(half):
    model = gpt()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss=[loss, None])
    tokens = np.ones((2, 5), "int32")
    model.fit(tokens, [tokens, tokens], verbose=0)
    block, head = model.layers[2:]
    own = keras_mp.keras_private.layers_in(block)
    assert {layer.compute_dtype for layer in own} == {half}
    assert head.compute_dtype == "float32"
    assert [dtype_of(x) for x in model(tokens)] == ["float32", "float32"]
    assert [x.dtype for x in model.predict(tokens, verbose=0)] == ["float32"] * 2


def test_an_output_that_no_loss_reads_stays_half(half):
    inputs = keras.Input((2,))
    features = layers.Dense(3)(inputs)
    outputs = {"y": layers.Dense(1)(features), "features": features}
    model = keras.Model(inputs, outputs)
    model.compile("sgd", loss={"y": "mse"})
    assert computes(model)[1:] == [half, "float32"]
    assert {dtype_of(x) for x in model(X).values()} == {"float32"}


@pytest.mark.filterwarnings("ignore:The `native_serialization` parameter")
def test_an_exported_model_returns_float32(half, tmp_path):
    if BACKEND == "torch":
        pytest.skip("Keras exports to SavedModel on JAX and TensorFlow")
    tf = pytest.importorskip("tensorflow")
    model = Regression()
    model(X)
    model.export(str(tmp_path / "model"), verbose=False)
    served = tf.saved_model.load(str(tmp_path / "model"))
    (signature,) = (
        served.signatures["serving_default"].structured_input_signature[1].values()
    )
    x = tf.constant(X, signature.dtype)
    assert served.serve(x).dtype == tf.float32


@pytest.mark.parametrize(
    "structure", [1, [], [None, (1, [2])], {"b": [1], "a": {"d": 2, "c": (3, 4)}}]
)
def test_leaves_are_those_of_keras(structure):
    found = keras.tree.flatten(structure)
    assert sorted(leaves(structure), key=str) == sorted(found, key=str)


@pytest.mark.skipif(BACKEND != "torch", reason="memory that Python frees")
@pytest.mark.parametrize("kind", [list, dict])
def test_outputs_go_with_their_step(kind):
    import torch

    keras_mp.set_global_policy("mixed_bfloat16")
    inputs = keras.Input((3,))
    x = layers.Dense(4)(inputs)
    outputs = [layers.Dense(37, name=name)(x) for name in "ab"]
    outputs = dict(zip("ab", outputs, strict=True)) if kind is dict else outputs
    model = keras.Model(inputs, outputs)
    model.compile("adam", {"a": "mse", "b": "mse"} if kind is dict else ["mse"] * 2)
    x, y = np.ones((5, 3), "float32"), np.ones((5, 37), "float32")
    y = {"a": y, "b": y} if kind is dict else [y, y]

    def alive():
        model.train_on_batch(x, y)
        found = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        return sum(o.shape == (5, 37) for o in found)

    gc.collect()
    gc.disable()
    try:
        numbers = [alive() for _ in range(4)]
    finally:
        gc.enable()
    assert len(set(numbers[1:])) == 1
