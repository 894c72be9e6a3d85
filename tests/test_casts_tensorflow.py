"""What a step of TensorFlow casts without XLA, beside Keras' own policy."""

import keras
import numpy as np
import pytest
from backends import BACKEND

if BACKEND != "tensorflow":
    pytest.skip("the graph of TensorFlow", allow_module_level=True)

import tensorflow as tf

import keras_mp
from benchmarks.models import convolutions, decoder, dense, vision_transformer

SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
IDS, IMAGES = ((4, 16), "int32"), ((4, 32, 32, 3), "float32")
MATRIX = (4, 64), "float32"
MODELS = {
    "decoder": (lambda: decoder(1000, 16, 64, 2, 4), SPARSE, IDS, IDS),
    "ViT": (
        lambda: vision_transformer(32, 8, 64, 2, 4, 10),
        *(SPARSE, IMAGES, ((4,), "int32")),
    ),
    "MLP": (lambda: dense(64, 4), "mse", MATRIX, MATRIX),
    "convolutions": (
        lambda: convolutions(32, 8, 2, 10),
        *(SPARSE, IMAGES, ((4,), "int32")),
    ),
}
# Of the loss scale, and of constants that are cast once.
SCALARS = 16


def elements_cast(model):
    """How many elements a step casts between float16 and float32."""
    make, loss, *batch = MODELS[model]
    model = make()
    model.compile(keras.optimizers.Adam(), loss, jit_compile=False)
    batch = [np.zeros(*ends) for ends in batch]
    model.optimizer.build(model.trainable_variables)
    step = tf.function(model.train_step)
    graph = step.get_concrete_function(tuple(map(tf.constant, batch))).graph
    return sum(
        operation.outputs[0].shape.num_elements()
        for operation in graph.get_operations()
        if operation.type == "Cast"
        and {x.dtype for x in (*operation.inputs, *operation.outputs)}
        == {tf.float16, tf.float32}
    )


@pytest.mark.parametrize("model", MODELS)
def test_a_step_casts_no_more_than_with_keras_own_policy(model, monkeypatch):
    # On CPUs TensorFlow sums a bias' gradient in half precision, which a repair mends.
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: [gpu])
    keras_mp.uninstall()
    keras.config.set_dtype_policy("mixed_float16")
    plain = elements_cast(model)
    keras_mp.set_global_policy("mixed_float16")
    found = elements_cast(model)
    assert 0 < found <= plain + SCALARS
