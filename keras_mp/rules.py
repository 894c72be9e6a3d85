"""Which layers stay in float32, and why.

A rule is a predicate on a layer, with a reason and its source. The first rule that
matches decides; a layer that none matches computes in half precision.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import keras
from keras.src.backend.common.name_scope import current_path

SOFTMAX_NAMES = {"softmax", "log_softmax"}


@dataclasses.dataclass(frozen=True)
class Rule:
    """Why a layer computes in float32.

    Attributes:
        name: what the rule is called in tables.
        matches: layer -> bool.
        reason: one sentence.
        source: where the reason comes from.
    """

    name: str
    matches: Callable[[Any], bool]
    reason: str
    source: str


def is_softmax(layer: Any) -> bool:
    """Does the layer return probabilities or log-probabilities of a softmax?"""
    if isinstance(layer, keras.layers.Softmax):
        return True
    if isinstance(layer, keras.layers.Wrapper):
        return is_softmax(layer.layer)
    activation = getattr(layer, "activation", None)
    while isinstance(activation, functools.partial):
        activation = activation.func
    if isinstance(activation, keras.layers.Layer):
        return is_softmax(activation)
    # By name, so that jax.nn.softmax and tf.nn.softmax (softmax_v2) are found as well.
    return getattr(activation, "__name__", "").removesuffix("_v2") in SOFTMAX_NAMES


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
RULES = (SOFTMAX,)


def user_rule(pattern: Any) -> Rule:
    """The rule for one entry of a policy's `float32=[...]`.

    Args:
        pattern: a layer class, a regular expression that the whole path of a layer
            must match, or a predicate layer -> bool.

    Raises:
        ValueError: for a regular expression that does not compile.
        TypeError: for anything else.
    """
    if isinstance(pattern, type) and issubclass(pattern, keras.layers.Layer):
        return _users(pattern.__name__, lambda layer: isinstance(layer, pattern))
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
    if callable(pattern) and not isinstance(pattern, (type, keras.layers.Layer)):
        return _users(getattr(pattern, "__name__", repr(pattern)), pattern)
    raise TypeError(
        "`float32` must hold layer classes, regular expressions of layer paths, or "
        f"predicates layer -> bool. Received: float32=[{pattern!r}]."
    )


def _users(name: str, matches: Callable[[Any], bool]) -> Rule:
    return Rule(name, matches, "asked for by `float32=`", "the user")


def layer_path(layer: Any) -> str:
    """The path of a layer, also during its first call, when Keras has none yet."""
    if layer.path:
        return layer.path
    scope = current_path()
    return f"{scope}/{layer.name}" if scope else layer.name
