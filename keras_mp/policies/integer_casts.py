"""Names a layer that makes integers of numbers which half precision has rounded.

Ids in a table of float32 numbers: a layer that cuts them out of its input gets the
table in half precision, in which 70000 is infinite and 2049 is 2048. It is seen at the
layer's first call on values.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

import keras_mp.keras_private as private
from keras_mp.backends import engine
from keras_mp.backends.interface import HALF, WHOLE
from keras_mp.backends.leaves import leaves
from keras_mp.messages import warn
from keras_mp.policies.layers import policy_of
from keras_mp.policies.paths import layer_path
from keras_mp.policies.record import Precision
from keras_mp.types import Layer


def look(layer: Layer, arguments: Any, call: Callable[[], Any]) -> None:
    """Warns if a layer casts whole numbers to integers that were others before.

    Args:
        arguments: what the layer was called with, on values, before Keras' own casts.
        call: calls it once more.
    """
    dtype = policy_of(layer).compute_dtype
    if dtype not in HALF:
        return
    layers = private.layers_in(layer)
    before = Precision(layers)
    losses = [(x, private.own_losses(x)) for x in layers]
    try:
        found = next(filter(None, (_rounded(x, dtype) for x in leaves(arguments))), ())
        with keras.StatelessScope(collect_losses=True):
            casts = engine.integer_casts(call) if found else []
    except Exception:  # It cannot be read, or called again.
        return
    finally:
        before.put_back()
        for x, own in losses:
            if own and not private.own_losses(x):  # An outermost call forgets them.
                x.add_loss(own)
    if casts:
        value, turned = found
        warn(
            f"{layer_path(layer)} casts {dtype} to {casts[0].target}, and {value:.0f} "
            f"of its input is {turned:.0f} in {dtype}. Keep the layer in float32: give "
            'it dtype="float32".'
        )


def _rounded(x: Any, dtype: str) -> tuple[float, ...]:
    """A whole number in a tensor that a dtype rounds, and what it becomes; or empty."""
    if keras.backend.standardize_dtype(getattr(x, "dtype", "bool")) != "float32":
        return ()
    array = ops.convert_to_numpy(x).ravel()
    whole = array[(array == np.floor(array)) & (np.abs(array) > WHOLE[dtype])]
    turned = ops.convert_to_numpy(ops.cast(ops.cast(whole, dtype), "float32"))
    places = np.flatnonzero(whole != turned)[:1]
    return tuple(float(numbers[i]) for i in places for numbers in (whole, turned))
