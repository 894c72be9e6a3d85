"""What `compile` means for a model, and what is made up for if no seam was in then.

A model may be compiled before half precision is asked for, or by the very call that
asks: `model.compile(keras_mp.LossScaleOptimizer("adam"))`.
"""

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp.backends import engine
from keras_mp.loss_scaling.wrapping import wrap_optimizers
from keras_mp.policies import heads, outputs
from keras_mp.policies.reach import warn_of_unreached
from keras_mp.sharding import warn_of_torchs_own
from keras_mp.types import Model

# What the calls of `compile` that somebody has taken notice of have left for files.
_noted: weakref.WeakSet = weakref.WeakSet()


def note(model: Model, scales: bool) -> None:
    """Takes notice of a model that was just compiled.

    Args:
        model: a model.
        scales: its `auto_scale_loss`.
    """
    if not scales:
        # Keras forgets it and would wrap the optimizer of the reopened model.
        private.compile_config(model)["auto_scale_loss"] = False
    _noted.add(private.last_compile(model))
    if model.optimizer is not None:
        heads.find_heads(model, vars(model.optimizer).pop(heads.IN_FILES, {}))
    outputs.note_compiled(model)
    wrap_optimizers(model)
    warn_of_unreached(model)
    if engine.shards:
        warn_of_torchs_own(model)


def make_up(model: Model) -> None:
    """Takes notice of a model that is compiled, if nobody has.

    If its policy is mixed_float16 and nothing scales its loss, that was asked for by
    `auto_scale_loss=False`. What a model in float32 was given Keras does not remember.
    """
    if model.compiled and private.last_compile(model) not in _noted:
        scaler = keras.optimizers.LossScaleOptimizer
        is_mixed = model.dtype_policy.name == "mixed_float16"
        note(model, scales=isinstance(model.optimizer, scaler) or not is_mixed)


def wrap_compile(original: Callable) -> Callable:
    """Wraps `compile`."""
    signature = inspect.signature(original)

    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            call = signature.bind(self, *args, **kwargs)
        except TypeError:
            return original(self, *args, **kwargs)  # Keras raises its own error.
        call.apply_defaults()
        automatic = call.arguments["auto_scale_loss"]
        # Keras decides by the policy's name whether to wrap; we by the layers.
        call.arguments["auto_scale_loss"] = False
        result = original(*call.args, **call.kwargs)
        note(self, automatic)
        return result

    return compile
