"""A function compiled by the backend in use."""

from collections.abc import Callable

import keras


def compiled(function: Callable) -> Callable:
    """Compiles a function of tensors; torch runs it as it is."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(function)
    return function
