"""`export` for LiteRT: the file computes in float32, the model stays as it was."""

import keras
import numpy as np
import pytest
from backends import BACKEND, same_bits, values
from keras import layers

import keras_mp
from keras_mp.policies.layers import policy_of

VERSION = tuple(map(int, keras.__version__.split(".")[:2]))
# Keras exports to LiteRT since 3.13; under torch it needs litert-torch.
pytestmark = [
    pytest.mark.skipif(
        BACKEND != "tensorflow" or VERSION < (3, 13),
        reason="only TensorFlow brings a converter for LiteRT",
    ),
    pytest.mark.filterwarnings("ignore"),  # Of the converter and the interpreter.
]
X = np.random.default_rng(0).normal(size=(4, 8, 8, 3)).astype("float32")


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner, self.head = keras.Sequential(body()), layers.Dense(2)

    def call(self, x):
        return self.head(self.inner(x))


def body():
    return [
        layers.Conv2D(4, 3, padding="same"),
        layers.BatchNormalization(),
        layers.Activation("relu"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(8, activation="gelu"),
    ]


def functional():
    inputs = x = keras.Input((8, 8, 3))
    for layer in body():
        x = layer(x)
    x = keras.ops.concatenate([x, 2 * x], axis=-1)
    return keras.Model(inputs, layers.Dense(2, activation="softmax")(x))


def sequential():
    return keras.Sequential([keras.Input((8, 8, 3)), *body(), layers.Dense(2)])


def trained(build):
    model = build()
    model.compile("adam", "mse")
    model.fit(X, np.eye(2, dtype="float32")[[0, 1, 0, 1]], verbose=0)
    return model


def run(path, x):
    """The outputs of a file, by the interpreter that has no kernels of TensorFlow's."""
    import tensorflow as tf

    interpreter = tf.lite.Interpreter(str(path))
    (given,), (made,) = (
        interpreter.get_input_details(),
        interpreter.get_output_details(),
    )
    interpreter.resize_tensor_input(given["index"], x.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(given["index"], x)
    interpreter.invoke()
    return interpreter.get_tensor(made["index"]), interpreter.get_tensor_details()


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("build", [functional, sequential, Net])
@pytest.mark.sampled
def test_a_file_for_litert_computes_in_float32_what_the_model_predicts(
    build, policy, tmp_path
):
    with keras_mp.policy_scope(policy):
        model = trained(build)
    half = policy.removeprefix("mixed_")
    predicted = model.predict(X, verbose=0)
    computing = [policy_of(x).compute_dtype for x in model._flatten_layers()]
    assert half in computing
    state = values(model.variables)
    model.export(tmp_path / "model.tflite", format="litert", verbose=False)
    found, tensors = run(tmp_path / "model.tflite", X)
    assert found.dtype == np.float32
    assert {t["dtype"] for t in tensors} <= {np.float32, np.int32}
    rounding = 2**-9 if half == "float16" else 2**-6
    np.testing.assert_allclose(found, predicted, atol=2 * rounding)
    # Nothing is left of it: the next prediction is in half precision again.
    assert [policy_of(x).compute_dtype for x in model._flatten_layers()] == computing
    assert same_bits(state, values(model.variables))
    model.predict_function = None
    np.testing.assert_array_equal(model.predict(X, verbose=0), predicted)


def test_the_converter_may_store_the_weights_in_float16(tmp_path):
    import tensorflow as tf

    with keras_mp.policy_scope("mixed_float16"):
        model = trained(sequential)
    model.export(
        tmp_path / "model.tflite",
        format="litert",
        verbose=False,
        optimizations=[tf.lite.Optimize.DEFAULT],
        target_spec={"supported_types": [tf.float16]},
    )
    found, tensors = run(tmp_path / "model.tflite", X)
    assert np.float16 in {t["dtype"] for t in tensors}
    np.testing.assert_allclose(found, model.predict(X, verbose=0), atol=2**-8)
