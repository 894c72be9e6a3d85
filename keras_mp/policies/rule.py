"""A rule: a predicate on a layer, with a reason and its source."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import keras

from keras_mp.policies.layers import keras_path
from keras_mp.policies.paths import layer_path
from keras_mp.tables import Table
from keras_mp.types import Layer

BACKENDS = ("jax", "tensorflow", "torch")


def never(layer: Layer) -> bool:
    return False


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
        alone: whether it is only about the layer itself, not the layers that it holds.
        unless: layer -> bool, asked at the layer's first call: if True, the rule does
            not apply.
        of: the only classes of layers that `applies` is asked of, or class -> bool.
    """

    name: str
    applies: Callable[[Any], bool] | tuple[type, ...]
    reason: str
    source: str
    backends: tuple[str, ...] = BACKENDS
    alone: bool = False
    unless: Callable[[Any], bool] = never
    of: tuple[type, ...] | Callable[[type], bool] = (keras.layers.Layer,)

    def is_about(self, kind: type) -> bool:
        """May it keep layers of this class in float32, on the backend in use?"""
        if keras.backend.backend() not in self.backends:
            return False
        of = self.applies if isinstance(self.applies, tuple) else self.of
        return issubclass(kind, of) if isinstance(of, tuple) else of(kind)

    def fails(self, layer: Layer) -> bool:
        """Does it not apply to a layer, although it is about its class?"""
        return self.unless is not never and self.unless(layer)

    def holds(self, layer: Layer) -> bool:
        """Does it keep a layer in float32, of a class that it is about?"""
        if isinstance(self.applies, tuple):
            return not self.fails(layer)
        return bool(self.applies(layer))

    def matches(self, layer: Layer) -> bool:
        """Does it keep this layer in float32, on the backend in use?"""
        return self.is_about(type(layer)) and self.holds(layer)


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
    if isinstance(pattern, type) and issubclass(pattern, keras.layers.Layer):
        return _users(pattern.__name__, (pattern,))
    if isinstance(pattern, str):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                "`float32` must hold valid regular expressions. Received: "
                f"float32=[{pattern!r}], which is not: {error}."
            ) from error
        return _users(pattern, functools.partial(_has_path, pattern))
    if callable(pattern) and not isinstance(pattern, (type, keras.layers.Layer)):
        return _users(getattr(pattern, "__name__", repr(pattern)), pattern)
    raise TypeError(
        "`float32` must hold layer classes, regular expressions of layer paths, "
        f"predicates layer -> bool, or rules. Received: float32=[{pattern!r}]."
    )


def _has_path(pattern: str, layer: Layer) -> bool:
    paths = layer_path(layer), keras_path(layer)
    return any(re.fullmatch(pattern, path) for path in paths)


def _users(name: str, applies: Any) -> Rule:
    return Rule(name, applies, "asked for by `float32=`", "the user")
