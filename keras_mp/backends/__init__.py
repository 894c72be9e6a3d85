"""What is asked of a framework, and each one's answers.

`engine` is the `Engine` of the backend that Keras runs on: the one choice of a backend.
"""

import importlib

import keras

from keras_mp.backends.interface import Engine
from keras_mp.errors import BACKENDS


def _import_engine() -> Engine:
    name = keras.backend.backend()
    if name not in BACKENDS:
        raise ImportError(
            "keras_mp trains on the backends jax, tensorflow and torch. Received: "
            f"KERAS_BACKEND={name}. Set the environment variable KERAS_BACKEND."
        )
    return importlib.import_module(f"keras_mp.backends.{name}.engine").engine


engine: Engine = _import_engine()
