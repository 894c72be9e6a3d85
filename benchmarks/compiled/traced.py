"""The step of `fit` of a compiled model, as its backend traces it."""

import inspect
from typing import Any
from unittest import mock

import keras


def by_jax(model: keras.Model, data: Any) -> tuple[Any, tuple]:
    """The jitted step and its arguments: the state, which is donated, and the batch."""
    model.make_train_function()
    state = tuple(
        [v.value for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    )
    step = inspect.getclosurevars(inspect.unwrap(model.train_function))
    return step.nonlocals["step_function"], (state, data)


def by_tensorflow(model: keras.Model, data: Any) -> bytes:
    """The step as StableHLO, with the shapes of the batch."""
    import tensorflow as tf

    jitted, real = [], tf.function

    def function(func: Any = None, **options: Any) -> Any:
        if func is None:
            return lambda func: function(func, **options)
        made = real(func, **options)
        if options.get("jit_compile"):
            jitted.append(made)
        return made

    with mock.patch.object(tf, "function", function):
        model.make_train_function()
    step, *_ = jitted
    batch = tf.nest.map_structure(tf.constant, data)
    return step.experimental_get_compiler_ir(batch)(stage="stablehlo_serialized")
