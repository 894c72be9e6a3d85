"""Which layers stay in float32, and why.

A rule is a predicate on a layer, with a reason and its source. The first rule that
matches decides; a layer that none matches computes in half precision. `print(RULES)`
shows them as a table. `sweeps/README.md` has the measurements that they stand on.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import keras
from keras.src.backend.common.name_scope import current_path

from keras_mp.tables import Table

layers = keras.layers

BACKENDS = ("jax", "tensorflow", "torch")
SOFTMAX_NAMES = {"softmax", "log_softmax", "sparsemax"}
# Above it float16 no longer holds every whole number.
LARGEST_COUNT = 2048
WIDE = 1024


@dataclasses.dataclass(frozen=True)
class Rule:
    """Why a layer computes in float32.

    Attributes:
        name: what the rule is called in tables.
        applies: layer -> bool, or a tuple of layer classes. Classes are known when a
            layer is created; all else is asked at its first call.
        reason: one sentence.
        source: where the reason comes from.
        backends: the Keras backends on which it holds.
    """

    name: str
    applies: Callable[[Any], bool] | tuple[type, ...]
    reason: str
    source: str
    backends: tuple[str, ...] = BACKENDS

    def matches(self, layer: Any) -> bool:
        """Does the rule keep this layer in float32, on the backend in use?"""
        if keras.backend.backend() not in self.backends:
            return False
        if isinstance(self.applies, tuple):
            return isinstance(layer, self.applies)
        return bool(self.applies(layer))


class RuleTable(tuple[Rule, ...]):
    """Rules in the order in which they are asked; prints as a table."""

    def table(self) -> Table:
        rows = [
            (
                rule.name,
                "all" if rule.backends == BACKENDS else ", ".join(rule.backends),
                rule.reason,
                rule.source,
            )
            for rule in self
        ]
        return Table(("stays in float32", "on", "because", "source"), rows)

    def __str__(self) -> str:
        return self.table().text()

    def _repr_html_(self) -> str:
        return self.table().html()


def is_softmax(layer: Any) -> bool:
    """Does the layer return probabilities or log-probabilities of a softmax?"""
    return isinstance(layer, layers.Softmax) or activation_of(layer) in SOFTMAX_NAMES


def activation_of(layer: Any) -> str:
    """The name of a layer's activation function; empty if it has none."""
    activation = getattr(layer, "activation", None)
    while isinstance(activation, functools.partial):
        activation = activation.func
    if isinstance(activation, layers.Softmax):
        return "softmax"
    if isinstance(activation, layers.Layer):
        return activation_of(activation)
    # By name, so that jax.nn.softmax and tf.nn.softmax (softmax_v2) are found as well.
    return getattr(activation, "__name__", "").removesuffix("_v2")


def note_input_shape(layer: Any, args: tuple) -> None:
    """Remembers the shape of a layer's first input, for the rules that ask for it."""
    shape = getattr(args[0], "shape", None) if args else None
    if shape is not None:
        vars(layer)["_keras_mp_input_shape"] = tuple(shape)


def input_shape(layer: Any) -> tuple[int | None, ...]:
    """The shape of a layer's first input; empty while it is not known."""
    return vars(layer).get("_keras_mp_input_shape", ())


def _raw_data_classes() -> tuple[type, ...]:
    exported = [c for c in vars(layers).values() if isinstance(c, type)]
    bases = {base for c in exported for base in c.__mro__}
    return tuple(
        base
        for base in bases
        if base.__module__.startswith("keras.src.layers.preprocessing")
    )


def _sums_in_float16(layer: Any) -> bool:
    pooling = (layers.AveragePooling1D, layers.AveragePooling2D)
    return isinstance(layer, pooling) and math.prod(layer.pool_size) > WIDE


def _runs_long(layer: Any) -> bool:
    cell = getattr(layer, "cell", None)
    cells = getattr(cell, "cells", [cell])
    steps = input_shape(layer)[1:2] or (None,)
    return (
        isinstance(layer, layers.RNN)
        and any(isinstance(cell, layers.LSTMCell) for cell in cells)
        and (steps[0] or 0) > LARGEST_COUNT
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
    lambda layer: False,  # Decided by `compile`, which knows the model's outputs.
    "what the loss sees is not rounded",
    "TensorFlow's mixed precision guide, 'Building the model'",
)
WRAPPED = Rule(
    "what it wraps",
    lambda layer: False,  # Decided where the policies of both are known.
    "a wrapper computes in the precision of the layer that it wraps",
    "Keras: TimeDistributed calls the layer's `call` itself",
)
RULES = RuleTable(
    (
        SOFTMAX,
        OUTPUT,
        WRAPPED,
        Rule(
            "preprocessing",
            _raw_data_classes(),
            "it sees data as they came, which half precision rounds or cannot hold",
            _MEASURED,
        ),
        Rule(
            "Masking",
            lambda layer: isinstance(layer, layers.Masking) and layer.mask_value != 0,
            "half precision rounds what is compared with the mask value",
            _MEASURED,
        ),
        Rule(
            "activity_regularizer",
            lambda layer: getattr(layer, "activity_regularizer", None) is not None,
            "its sum over all activations passes 65504",
            _MEASURED,
        ),
        Rule(
            "UnitNormalization, Dot(normalize=True)",
            lambda layer: (
                isinstance(layer, layers.UnitNormalization)
                or (isinstance(layer, layers.Dot) and layer.normalize)
            ),
            "sums of squares pass 65504 or vanish",
            _MEASURED,
        ),
        Rule(
            "squareplus",
            lambda layer: activation_of(layer) == "squareplus",
            "the square of 256 passes 65504",
            _MEASURED,
        ),
        Rule(
            "SpectralNormalization",
            (layers.SpectralNormalization,),
            "it writes its weights anew in each step: rounded, and on torch not at all",
            _MEASURED,
        ),
        Rule(
            "averages",
            (layers.GlobalAveragePooling1D, layers.Average),
            "the sum, and the count of a mask, pass 65504 where the average does not",
            _MEASURED,
        ),
        Rule(
            "long LSTM",
            _runs_long,
            f"beyond {LARGEST_COUNT} a cell state no longer grows by steps of 1",
            _MEASURED,
        ),
        Rule(
            "wide average pooling",
            _sums_in_float16,
            f"float16 sums of more than {WIDE} values are far off on CPUs",
            _MEASURED,
            ("tensorflow",),
        ),
        Rule(
            "adaptive average pooling",
            (layers.AdaptiveAveragePooling1D, layers.AdaptiveAveragePooling2D),
            "its windows grow with its input, and their sums are made in float16",
            _MEASURED,
            ("tensorflow",),
        ),
        Rule(
            "interpolated UpSampling2D",
            lambda layer: (
                isinstance(layer, layers.UpSampling2D)
                and layer.interpolation != "nearest"
            ),
            "it fails under XLA, and has no gradient in half precision",
            _MEASURED,
            ("tensorflow",),
        ),
        Rule(
            "3-D pooling",
            (
                layers.AveragePooling3D,
                layers.MaxPooling3D,
                layers.AdaptiveAveragePooling3D,
                layers.AdaptiveMaxPooling3D,
            ),
            "there is no half-precision kernel for CPUs",
            _MEASURED,
            ("tensorflow", "torch"),
        ),
        Rule(
            "ConvLSTM3D",
            (layers.ConvLSTM3D,),
            "its bfloat16 gradient is garbage on CPUs",
            _MEASURED,
            ("tensorflow", "torch"),
        ),
        Rule(
            "masked attention",
            (layers.Attention, layers.AdditiveAttention),
            "a row whose every key is masked becomes nan",
            _MEASURED,
            ("torch",),
        ),
        Rule(
            "TorchModuleWrapper",
            (layers.TorchModuleWrapper,),
            "its inputs are cast, and the module's parameters are not",
            _MEASURED,
            ("torch",),
        ),
    )
)
_kept: dict[type, Rule] = {}


def keep_float32(layer_class: Any, reason: str | None = None) -> Any:
    """Keeps all layers of a class in float32 under every policy of ours.

    For the author of a library, as a decorator or a call. Layers of subclasses stay in
    float32 too.

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
    return layer_class


def rules_with(users: tuple[Rule, ...]) -> RuleTable:
    """All rules: the user's first, then those of `keep_float32`, then ours."""
    return RuleTable((*users, *_kept.values(), *RULES))


def user_rule(pattern: Any) -> Rule:
    """The rule for one entry of a policy's `float32=[...]`.

    Args:
        pattern: a layer class, a regular expression that the whole path of a layer
            must match, a predicate layer -> bool, or a `Rule`.

    Raises:
        ValueError: for a regular expression that does not compile.
        TypeError: for anything else.
    """
    if isinstance(pattern, Rule):
        return pattern
    if isinstance(pattern, type) and issubclass(pattern, layers.Layer):
        return _users(pattern.__name__, (pattern,))
    if isinstance(pattern, str):
        try:
            expression = re.compile(pattern)
        except re.error as error:
            raise ValueError(
                "`float32` must hold valid regular expressions. Received: "
                f"float32=[{pattern!r}], which is not: {error}."
            ) from error
        return _users(
            pattern, lambda layer: bool(expression.fullmatch(layer_path(layer)))
        )
    if callable(pattern) and not isinstance(pattern, (type, layers.Layer)):
        return _users(getattr(pattern, "__name__", repr(pattern)), pattern)
    raise TypeError(
        "`float32` must hold layer classes, regular expressions of layer paths, "
        f"predicates layer -> bool, or rules. Received: float32=[{pattern!r}]."
    )


def _users(name: str, applies: Any) -> Rule:
    return Rule(name, applies, "asked for by `float32=`", "the user")


def layer_path(layer: Any) -> str:
    """The path of a layer, also during its first call, when Keras has none yet."""
    if layer.path:
        return layer.path
    scope = current_path()
    return f"{scope}/{layer.name}" if scope else layer.name
