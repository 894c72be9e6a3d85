"""The numbers in a traced program, on TensorFlow."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_mp.backends.measures import SCOPE, Constant


def scope(name: str) -> Any:
    return tf.name_scope(name)


def constants(
    function: Callable, variables: Sequence[Any], arguments: Any
) -> list[Constant]:
    # Variables are read by operations, so they are not constants.
    specs = keras.tree.map_structure(
        lambda x: tf.TensorSpec(x.shape, x.dtype), arguments
    )
    traced = tf.function(function, autograph=False)
    found = []
    for operation in traced.get_concrete_function(specs).graph.get_operations():
        if operation.type != "Const":
            continue
        value = tf.make_ndarray(operation.get_attr("value"))
        if value.size != 1:
            continue
        uses = operation.outputs[0].consumers()
        casts = [use for use in uses if use.type == "Cast"]
        if uses and len(casts) == len(uses):
            # What counts is what it is cast to.
            turned = [(c.name, c.outputs[0].dtype.as_numpy_dtype) for c in casts]
        else:
            turned = [(operation.name, value.dtype)]
        for name, dtype in turned:
            names = re.findall(SCOPE, name)
            number = value.astype(dtype)
            if keras.backend.is_float_dtype(number.dtype.name):
                scope_of = names[-1] if names else ""
                found.append(
                    Constant(scope_of, float(number.reshape(())), number.dtype.name)
                )
    return found
