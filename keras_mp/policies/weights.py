"""The dtype of weights that exist before their layer's policy is decided.

Only `BFloat16` needs this: all our other policies keep weights in float32. A layer that
its caller has built, above all an output layer, was built for bfloat16.
"""

import math
from collections.abc import Iterable
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp.backends import engine
from keras_mp.backends.interface import BFLOAT16
from keras_mp.types import Layer

# Elements in the kernel of a large head. With 2**18 a step gains 0 to 2 % on an H100,
# with 2**20 2 to 8 %, with 2**24 16 %: four Dense of one width, batches of 512 and
# 4096, compiled and read as flops and bytes.
LARGE = 2**18


def has_large(layer: Layer) -> bool:
    """Does the layer multiply by a large kernel, once in a call?"""
    recurrent = isinstance(layer, (keras.layers.RNN, keras.layers.Bidirectional))
    return not recurrent and any(
        _is_large(weight)
        for part in private.layers_in(layer)
        for weight in private.own_trainable(part)
    )


def has_bfloat16(weights: Iterable[Any]) -> bool:
    return any(private.stored_dtype(weight) == BFLOAT16 for weight in weights)


def bring_to(dtype: str, layer: Layer, large: str) -> bool:
    """Casts a layer's own weights to one dtype, and its large ones perhaps to another.

    Args:
        dtype: "float32" or "bfloat16". Weights of any third dtype stay.
        layer: a layer, built or not.
        large: the dtype of large weights.

    Returns:
        Whether any has changed.
    """
    changed = False
    for variable in private.own_variables(layer):
        wanted = large if _is_large(variable) else dtype
        if private.stored_dtype(variable) in {"float32", BFLOAT16} - {wanted}:
            engine.set_dtype(variable, wanted)
            changed = True
    return changed


def _is_large(weight: Any) -> bool:
    # With many classes a bias may be as long, but nothing is multiplied by it.
    return len(weight.shape) > 1 and math.prod(weight.shape) >= LARGE
