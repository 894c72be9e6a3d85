"""Policies that reach no layer: set too late, or for a path that no layer has."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp.backends.interface import HALF
from keras_mp.messages import warn
from keras_mp.policies.choosing import decision_for
from keras_mp.policies.layers import policy_of
from keras_mp.policies.paths import layer_path
from keras_mp.policies.policy import chooser_of, policies_in, was_asked_for
from keras_mp.types import Layer, Model

# The models that were warned about, or need no warning.
_examined: weakref.WeakSet = weakref.WeakSet()


def warn_of_unreached(model: Model) -> bool:
    """Warns once of the policies that reach no layer of a model, when it is built.

    Returns:
        Whether there is nothing left to look at.
    """
    if model not in _examined and all(x.built for x in private.layers_in(model)):
        _examined.add(model)
        for path, sentence, remedy in unreached(model):
            warn(f"{path} {sentence} {remedy}")
    return model in _examined


def warn_of_unmatched(model: Model, policy: Any) -> None:
    """Warns of the patterns of a policy, or of a map of them, that match no layer.

    For `convert`: its model may have been examined already, under another policy. If it
    is not built, `compile` or its first step warns.
    """
    layers = private.layers_in(model)
    if not all(layer.built for layer in layers):
        return
    _examined.add(model)
    choosers = map(chooser_of, policies_in(policy))
    for path, sentence, remedy in _unmatched(model, layers, choosers):
        warn(f"{path} {sentence} {remedy}")


def unreached(model: Model) -> Iterator[tuple[str, str, str]]:
    """Policies that reach no layer of a built model: path, sentence and remedy each."""
    layers = private.layers_in(model)
    if _is_late(model, layers):
        name = keras.config.dtype_policy().name
        yield (
            layer_path(model),
            f"was created before {name} became the global policy, and computes in "
            "float32.",
            "Set the policy before the model is created, or call "
            f"`keras_mp.convert(model, {str(name)!r})`.",
        )
    decisions = [d for d in map(decision_for, layers) if d is not None]
    choosers = [chooser_of(policy_of(layer)) for layer in layers]
    choosers += [decision.chooser for decision in decisions]
    yield from _unmatched(model, layers, choosers)


def _unmatched(
    model: Model, layers: list[Layer], choosers: Iterable[Any]
) -> Iterator[tuple[str, str, str]]:
    """The patterns of policies that match no layer of a model, as `unreached` does."""
    for policy in {id(chooser): chooser for chooser in choosers if chooser}.values():
        for pattern in policy.unmatched_patterns(layers):
            inner = [
                x for x in layers[1:] if not isinstance(x, keras.layers.InputLayer)
            ]
            paths = [layer_path(layer) for layer in inner[:2] or layers]
            yield (
                layer_path(model),
                f"has no layer that float32=[{pattern!r}] matches, nor had any model "
                "before it.",
                "A pattern has to match the whole path of a layer, such as "
                f"{' or '.join(map(repr, paths))}.",
            )


def _is_late(model: Model, layers: list[Layer]) -> bool:
    """Is a model in float32 by Keras' default, although the global policy is ours now?

    Layers that nobody gave a policy share one object with their model.
    """
    own = policy_of(model)
    return (
        chooser_of(keras.config.dtype_policy()) is not None
        and own.name == "float32"
        and not was_asked_for(own)
        and any(policy_of(x) is own and x.weights for x in layers[1:])
        and not any(policy_of(x).compute_dtype in HALF for x in layers)
        and not any(decision_for(x) for x in layers)
    )
