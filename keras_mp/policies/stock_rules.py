"""Which layers stay in float32, and why.

The first rule that matches decides; if none matches, the layer computes in half
precision. `print(RULES)` shows them as a table; `sweeps/README.md` has the measurements
behind them.
"""

import dataclasses
import math
import weakref
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp.backends.interface import HALF
from keras_mp.policies.layers import first_input, has_activation, input_shape
from keras_mp.policies.rule import Rule, RuleTable, never
from keras_mp.types import Layer

layers = keras.layers

SOFTMAX_NAMES = {"softmax", "log_softmax", "sparsemax"}
# Above it float16 no longer holds every whole number.
LARGEST_EXACT_INTEGER = 2048
# The bfloat16 sum of this many equal numbers is right; at 256 it no longer grows.
WIDE = 128


def is_softmax(layer: Layer) -> bool:
    """Does the layer return probabilities or log-probabilities of a softmax?"""
    return isinstance(layer, layers.Softmax) or has_activation(layer, SOFTMAX_NAMES)


def _if_there(*names: str) -> tuple[type, ...]:
    """The layers of these names, without those that this Keras does not have yet."""
    return tuple(getattr(layers, name) for name in names if hasattr(layers, name))


def is_fed_by_half_precision(layer: Layer) -> bool:
    """Does the layer see only the results of half-precision layers, and no raw data?

    For layers that are accurate enough there: linear ones.
    """
    linear = (
        layers.CenterCrop,
        layers.Normalization,
        layers.Rescaling,
        layers.Resizing,
    )
    first = first_input(layer)
    return isinstance(layer, linear) and first is not None and first.dtype in HALF


def is_wide_average(layer: Layer) -> bool:
    """Does the layer average windows so wide that sums in half precision are off?"""
    return isinstance(layer, _POOLING) and math.prod(layer.pool_size) > WIDE


_POOLING = (layers.AveragePooling1D, layers.AveragePooling2D)


def _runs_long(layer: Layer) -> bool:
    cell = getattr(layer, "cell", None)
    cells = getattr(cell, "cells", [cell])
    steps = input_shape(layer)[1:2] or (None,)
    return (
        any(isinstance(cell, layers.LSTMCell) for cell in cells)
        and (steps[0] or 0) > LARGEST_EXACT_INTEGER
    )


def _is_non_max_suppression(kind: type) -> bool:
    # By name, because importing KerasHub only for this would cost too much.
    return (kind.__module__.split(".")[0], kind.__name__) == (
        "keras_hub",
        "NonMaxSuppression",
    )


_MEASURED = "sweeps/README.md"
SOFTMAX = Rule(
    "softmax",
    is_softmax,
    "probabilities below 6e-8 vanish in float16, and with them the loss and gradient",
    "TensorFlow's mixed precision guide, 'Building the model'",
)
OUTPUT = Rule(
    "output layer",
    never,  # Decided by `compile`, which knows the model's outputs.
    "what the loss sees is not rounded",
    "TensorFlow's mixed precision guide, 'Building the model'",
    of=(),
)
OUTPUT_ALONE = dataclasses.replace(OUTPUT, alone=True)
WRAPPED = Rule(
    "what it wraps",
    never,  # Decided where the policies of both are known.
    "a wrapper computes in the precision of the layer that it wraps",
    "Keras: TimeDistributed calls the layer's `call` itself",
    of=(),
)
STORED = Rule(
    "its file",
    never,  # Decided where the file is read.
    "it was in float32 when its model was saved",
    "keras_mp/policies/saving.py",
)
MIXES_DTYPES = Rule(
    "mixes dtypes",
    never,  # Decided when its first call has failed.
    "its call in half precision fails for its dtypes",
    "keras_mp/policies/mixed_dtypes.py",
)
MIXES_DTYPES_ALONE = dataclasses.replace(MIXES_DTYPES, alone=True)
# For the policies under which weights are bfloat16.
BATCH_STATISTICS = Rule(
    "BatchNormalization",
    (layers.BatchNormalization,),
    "its moving averages stall in bfloat16: a mean of 3 stays below 2.5",
    "tests/test_bfloat16.py",
)
RULES = RuleTable(
    (
        SOFTMAX,
        OUTPUT,
        WRAPPED,
        Rule(
            "preprocessing",
            private.preprocessing_classes(),
            "it sees raw data, which half precision rounds or cannot hold",
            _MEASURED,
            unless=is_fed_by_half_precision,
        ),
        Rule(
            "Masking",
            lambda layer: layer.mask_value != 0,
            "half precision rounds what is compared with the mask value",
            _MEASURED,
            ("tensorflow",),
            of=(layers.Masking,),
        ),
        Rule(
            "activity_regularizer",
            lambda layer: getattr(layer, "activity_regularizer", None) is not None,
            "its sum over all activations passes 65504",
            _MEASURED,
        ),
        Rule(
            "UnitNormalization, Dot(normalize=True)",
            lambda layer: getattr(layer, "normalize", True),  # An attribute of Dot.
            "sums of squares pass 65504 or vanish",
            _MEASURED,
            of=(layers.UnitNormalization, layers.Dot),
        ),
        Rule(
            "squareplus",
            lambda layer: has_activation(layer, {"squareplus"}),
            "the square of 256 passes 65504",
            _MEASURED,
        ),
        Rule(
            "SpectralNormalization",
            (layers.SpectralNormalization,),
            "it writes its weights anew in each step: rounded, and on torch not at all",
            "Keras: its call assigns the kernel that it has normalized",
            alone=True,
        ),
        Rule(
            "averages",
            (
                layers.GlobalAveragePooling1D,
                layers.Average,
                layers.AveragePooling3D,
                *_if_there(
                    "AdaptiveAveragePooling1D",
                    "AdaptiveAveragePooling2D",
                    "AdaptiveAveragePooling3D",
                ),
            ),
            "the sum, and the count of a mask, pass 65504 where the average does not",
            _MEASURED,
        ),
        Rule(
            "Attention, AdditiveAttention",
            (layers.Attention,),  # And its subclass.
            "unscaled products pass 65504, and on torch masked rows become nan",
            _MEASURED,
        ),
        Rule(
            "long LSTM",
            _runs_long,
            f"beyond {LARGEST_EXACT_INTEGER} a cell state no longer grows by "
            "steps of 1",
            _MEASURED,
            of=(layers.RNN,),
        ),
        Rule(
            "wide average pooling",
            is_wide_average,
            f"sums of more than {WIDE} values pass 65504 or stall, on CPUs at least",
            _MEASURED,
            ("jax", "tensorflow"),
            of=_POOLING,
        ),
        Rule(
            "interpolated UpSampling2D",
            lambda layer: layer.interpolation != "nearest",
            "bicubic and Lanczos have no gradient in half, bilinear may fail under XLA",
            _MEASURED,
            ("tensorflow",),
            of=(layers.UpSampling2D,),
        ),
        Rule(
            "3-D max pooling",
            (layers.MaxPooling3D, *_if_there("AdaptiveMaxPooling3D")),
            "there is no float16 kernel for CPUs",
            _MEASURED,
            ("tensorflow",),
        ),
        Rule(
            "ConvLSTM3D",
            (layers.ConvLSTM3D,),
            "its bfloat16 gradient is garbage on CPUs",
            _MEASURED,
            ("tensorflow", "torch"),
        ),
        Rule(
            "NonMaxSuppression",
            lambda layer: True,
            "areas of decoded boxes pass 65504, and scores are rounded",
            "KerasHub 0.32, predictions of RetinaNetObjectDetector",
            of=_is_non_max_suppression,
        ),
        Rule(
            "TorchModuleWrapper",
            (layers.TorchModuleWrapper,),
            "its inputs are cast, and the module's parameters are not",
            _MEASURED,
            ("torch",),
        ),
        Rule(
            "TFSMLayer",
            (layers.TFSMLayer,),
            "its program takes the dtypes that it was exported with, and no others",
            "tests/test_rules.py",
            ("tensorflow",),
        ),
    )
)
# Unpacked at once where all of it is read, which threads cannot interrupt.
_kept: dict[type, Rule] = {}
# For each class of layers and rules of a policy, all rules that are about it.
_about: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def keep_float32(layer_class: Any, reason: str | None = None) -> Any:
    """Keeps all layers of a class in float32 under every policy of keras_mp.

    For authors of libraries; works as a decorator or a call. Layers of subclasses stay
    in float32 too.

    Args:
        layer_class: a subclass of `keras.layers.Layer`.
        reason: one sentence, for the table of rules.

    Returns:
        `layer_class`.

    Raises:
        TypeError: if `layer_class` is not a class of layers.

    Example:

    ```python
    @keras_mp.keep_float32
    class MyLayer(keras.layers.Layer):
        ...
    ```
    """
    if not (isinstance(layer_class, type) and issubclass(layer_class, layers.Layer)):
        raise TypeError(
            "`layer_class` must be a subclass of keras.layers.Layer. Received: "
            f"layer_class={layer_class!r}."
        )
    _kept[layer_class] = Rule(
        layer_class.__name__,
        (layer_class,),
        reason or "asked for by keep_float32",
        "its author",
    )
    _about.clear()
    return layer_class


def rules_with(users: tuple[Rule, ...], of_policy: tuple[Rule, ...]) -> RuleTable:
    """All rules: from the user, `keep_float32`, one policy, and all policies."""
    return RuleTable((*users, *_kept.values(), *of_policy, *RULES))


def rules_about(kind: type, of_policy: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The rules about a class of layers, but for those from the user."""
    known = _about.setdefault(kind, {})
    if of_policy not in known:
        rules = rules_with((), of_policy)
        known[of_policy] = tuple(rule for rule in rules if rule.is_about(kind))
    found: tuple[Rule, ...] = known[of_policy]
    return found
