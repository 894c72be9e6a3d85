"""Nothing is rounded at a model's door.

Keras casts what a subclassed model is called with to the model's compute dtype, and
what a Sequential model without an Input is called with to that of its first layer. In
half precision ids carried as floats become other ids, and raw features inf, even where
the first layer computes in float32. Each layer casts its own inputs; a model need not.
"""

from typing import Any

import keras
from keras.src import backend
from keras.src.models.functional import Functional

from keras_mp.policies import is_half, policy_of

_FLOAT32 = keras.DTypePolicy("float32")


def leave_as_they_come(layer: Any) -> None:
    """Notes on a model whether `as_they_came` takes the place of Keras' cast."""
    if isinstance(layer, keras.Model) and not isinstance(layer, Functional):
        half = is_half(policy_of(layer))
        if half or come_as_they_are(layer):
            layer._keras_mp_as_they_come = half
            layer._convert_input_args = not half  # As Functional models have it.


def come_as_they_are(layer: Any) -> bool:
    return vars(layer).get("_keras_mp_as_they_come", False)


def as_they_came(arguments: Any) -> Any:
    """Arrays as tensors of their own dtype; float64 becomes float32, as in Keras."""
    return keras.tree.map_structure(_tensor, arguments)


def _tensor(x: Any) -> Any:
    tensor = _FLOAT32.convert_input(x, False, "float32")
    if getattr(tensor, "dtype", None) is None or (
        backend.standardize_dtype(tensor.dtype) != "float64"
    ):
        return tensor
    cast = _FLOAT32.convert_input(tensor, True, "float32")
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
