"""Every test starts and ends under the global policy float32, with a fixed seed."""

import hypothesis
import keras
import pytest

import keras_mp

# A busy machine is no failure.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    # Four replicas for tf.distribute. TensorFlow wants to know before its first step.
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 4,
    )


@pytest.fixture(autouse=True)
def fresh_keras():
    keras.utils.set_random_seed(0)
    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)
    keras_mp.integration.install()
