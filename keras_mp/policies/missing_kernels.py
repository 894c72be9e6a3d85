"""Layers whose operations have no half precision, found when a step fails.

The first call of a layer is often symbolic, or in a trace, and shows no missing kernel:
those of linear algebra and of Fourier transforms are missed when a step is compiled or
runs, and some only in the gradient. Such an error names no layer. So the layers of the
user's are tried one by one, those inside first, and what fails alone for its dtypes
computes in float32 from there on.
"""

from typing import Any

import keras
import numpy as np
from keras import ops

import keras_mp.keras_private as private
from keras_mp.backends import engine
from keras_mp.backends.differentiation import differentiate
from keras_mp.backends.interface import BFLOAT16
from keras_mp.backends.leaves import leaves
from keras_mp.policies import mixed_dtypes, own_calls
from keras_mp.policies.layers import called_with, takes_training
from keras_mp.policies.outputs import note_changed
from keras_mp.policies.record import Precision
from keras_mp.types import Layer, Model

_OPEN = 4  # The size of an axis of which none is known.


def suspects(model: Model) -> list[Any]:
    """The layers of the user's that compute in half precision, those inside first."""
    return [layer for layer in reversed(private.layers_in(model)) if _may_miss(layer)]


def mended(model: Model, error: Exception) -> bool:
    """Keeps in float32 what makes the steps of a model fail for its dtypes, if found.

    Its variables must have their values.
    """
    if not mixed_dtypes.is_of_dtypes(error):
        return False
    return any(_kept(model, layer) for layer in suspects(model))


def _may_miss(layer: Layer) -> bool:
    if isinstance(layer, keras.Model):
        return own_calls.may_be_kept(layer)
    # A weight in bfloat16 has slots by now, and cannot become another one.
    stored = map(private.stored_dtype, layer.weights)
    return mixed_dtypes.may_be_kept(layer) and BFLOAT16 not in stored


def _kept(model: Model, layer: Layer) -> bool:
    before = Precision(private.layers_in(layer))
    ours = own_calls if isinstance(layer, keras.Model) else mixed_dtypes
    mends = False
    try:
        if _fails(layer):
            ours.keep(layer)
            mends = not _fails(layer)
            if mends:
                ours.tell(layer)
        else:  # A first call on values mends the layer itself.
            mends = not _may_miss(layer)
    finally:
        if not mends:
            before.put_back()
    if mends:
        note_changed(model, [layer])
    return mends


def _fails(layer: Layer) -> bool:
    """Does a layer fail alone for its dtypes, forward or backward?"""
    call = called_with(layer)
    if call is None:
        return False
    draw = np.random.default_rng(0)
    made: dict[int, Any] = {}
    for x in keras.tree.flatten(call):
        if isinstance(x, keras.KerasTensor):
            made[id(x)] = _tensor(x, draw)
    inputs = [x for x in made.values() if isinstance(x, keras.Variable)]

    def loss(_: Any, see: Any) -> Any:
        args, kwargs = keras.tree.map_structure(
            lambda x: _value(made[id(x)], x.dtype) if id(x) in made else x, call
        )
        if takes_training(layer):
            kwargs["training"] = True
        return sum(map(_sum, leaves(layer(*args, **kwargs))), ops.zeros(()))

    try:
        variables = [*layer.trainable_variables, *inputs]
        differentiate(loss, (), variables, [*layer.variables, *inputs], compiled=True)
    except engine.dtype_errors as error:
        return mixed_dtypes.is_of_dtypes(error)
    except Exception:  # Alone it does not run at all.
        return False
    finally:
        private.clear_losses(layer)
    return False


def _tensor(x: keras.KerasTensor, draw: np.random.Generator) -> Any:
    """Of a symbolic tensor's shape: a variable, or ones if it holds no floats."""
    shape = [_OPEN if size is None else size for size in x.shape]
    if not keras.backend.is_float_dtype(x.dtype):
        return ops.ones(shape, x.dtype)
    return keras.Variable(draw.normal(size=shape), dtype="float32")


def _value(x: Any, dtype: str) -> Any:
    return ops.cast(x, dtype) if isinstance(x, keras.Variable) else x


def _sum(x: Any) -> Any:
    is_float = ops.is_tensor(x) and keras.backend.is_float_dtype(x.dtype)
    return ops.sum(ops.cast(x, "float32") ** 2) if is_float else 0.0
