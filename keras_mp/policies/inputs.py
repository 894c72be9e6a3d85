"""A model's inputs keep their dtype until the first layer.

Keras casts the inputs of a subclassed model to the model's compute dtype, and those of
a Sequential model without an Input to that of its first layer. In half precision, ids
carried as floats become other ids, and raw features become inf, even if the first layer
computes in float32. Each layer casts its own inputs; a model need not.
"""

from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp.policies.layers import policy_of
from keras_mp.policies.policy import FLOAT32, is_half
from keras_mp.policies.record import record_of, records
from keras_mp.types import Layer, Model


def keep_input_dtypes(layer: Layer) -> None:
    """Turns off Keras' cast of the inputs in a half-precision model without a graph."""
    if isinstance(layer, keras.Model) and not isinstance(layer, private.Functional):
        half = is_half(policy_of(layer))
        if half or keeps_input_dtypes(layer):
            record_of(layer).keeps_input_dtypes = half
            # False, as in a Functional model.
            setattr(layer, private.CONVERT_INPUTS, not half)


def give_back() -> None:
    """Lets Keras cast the inputs of all models; their next calls are first ones."""
    for record in list(records.values()):
        layer = record.layer()
        if record.keeps_input_dtypes and layer is not None:
            record.keeps_input_dtypes, record.chosen = False, None
            setattr(layer, private.CONVERT_INPUTS, True)


def keeps_input_dtypes(layer: Layer) -> bool:
    """Was Keras' cast of the inputs turned off for this layer?"""
    record = records.get(id(layer))
    return record is not None and record.keeps_input_dtypes


def tensors_in_their_dtypes(arguments: Any) -> Any:
    """Arrays as tensors of their own dtype; float64 becomes float32, as in Keras."""
    return keras.tree.map_structure(_tensor, arguments)


def _tensor(x: Any) -> Any:
    tensor = FLOAT32.convert_input(x, False, "float32")
    if getattr(tensor, "dtype", None) is None or (
        keras.backend.standardize_dtype(tensor.dtype) != "float64"
    ):
        return tensor
    cast = FLOAT32.convert_input(tensor, True, "float32")
    mask = private.get_keras_mask(x)
    if mask is not None:
        private.set_keras_mask(cast, mask)
    return cast


def put_float32_input(model: Model, input_shape: Any) -> None:
    """Gives a Sequential model the Input that Keras would, but in float32."""
    layers = private.sequential_layers(model)
    first = layers[0] if layers else None
    if isinstance(first, (keras.layers.InputLayer, type(None))):
        return
    if not is_half(policy_of(first)):
        return
    if not _is_shape(input_shape):
        return  # Several inputs: Keras builds no graph either.
    inputs = keras.layers.InputLayer(batch_shape=tuple(input_shape), dtype="float32")
    private.set_sequential_layers(model, [inputs, *layers])


def _is_shape(shape: Any) -> bool:
    """Is it the shape of one tensor? Its sizes are numbers, None, or JAX symbols."""
    if isinstance(shape, (dict, str)) or not hasattr(shape, "__iter__"):
        return False
    return not any(isinstance(size, (tuple, list, dict, str)) for size in shape)
