"""Every test starts and ends under the global policy float32, with a fixed seed."""

import keras
import pytest

import keras_mp


@pytest.fixture(autouse=True)
def fresh_keras():
    keras.utils.set_random_seed(0)
    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)
    keras_mp.integration.install()
