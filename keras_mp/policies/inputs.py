"""A model's inputs keep their dtype until the first layer.

Keras casts the inputs of a subclassed model to the model's compute dtype, and those of
a Sequential model without an Input to that of its first layer. In half precision ids
carried as floats become other ids, and raw features become inf, even where the first
layer computes in float32. Each layer casts its own inputs; a model need not.
"""

from typing import Any

import keras
from keras.src import backend
from keras.src.models.functional import Functional

from keras_mp.policies.layers import policy_of
from keras_mp.policies.policy import FLOAT32, is_half


def keep_input_dtypes(layer: Any) -> None:
    """Takes Keras' cast of the inputs off a half-precision model that has no graph."""
    if isinstance(layer, keras.Model) and not isinstance(layer, Functional):
        half = is_half(policy_of(layer))
        if half or keeps_input_dtypes(layer):
            layer._keras_mp_keeps_input_dtypes = half
            layer._convert_input_args = not half  # As Functional models have it.


def keeps_input_dtypes(layer: Any) -> bool:
    """Was Keras' cast of the inputs taken off this layer?"""
    return vars(layer).get("_keras_mp_keeps_input_dtypes", False)


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
    mask = backend.get_keras_mask(x)
    if mask is not None:
        backend.set_keras_mask(cast, mask)
    return cast


def put_float32_input(model: Any, input_shape: Any) -> None:
    """Gives a Sequential model the Input that Keras would, but in float32."""
    first = model._layers[0] if model._layers else None
    if isinstance(first, (keras.layers.InputLayer, type(None))):
        return
    if not is_half(policy_of(first)):
        return
    try:
        shape = backend.standardize_shape(input_shape)
    except (TypeError, ValueError):
        return  # Several inputs: Keras builds no graph either.
    model._layers = [keras.layers.InputLayer(batch_shape=shape, dtype="float32")] + (
        model._layers
    )
