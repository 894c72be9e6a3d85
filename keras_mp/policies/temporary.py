"""Puts the layers of a model under other policies for a while."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp.backends.interface import HALF
from keras_mp.policies.layers import policy_of
from keras_mp.policies.policy import FLOAT32
from keras_mp.policies.record import Precision, record_of
from keras_mp.policies.weights import has_bfloat16
from keras_mp.types import Layer, Model

# Layer -> its policy, or None for the one that it has.
Choice = Callable[[Any], keras.DTypePolicy | None]


@contextlib.contextmanager
def temporary_policies(model: Model, choose: Choice) -> Iterator[None]:
    """Lets the layers of a model compute under other policies for a while."""
    layers = private.layers_in(model)
    before = Precision(layers)
    try:
        for layer, policy in [(x, choose(x)) for x in layers]:
            if policy is not None and layer.quantization_mode is None:
                # The public setter would write into a map that other layers share.
                private.set_policy(layer, policy)
                # So its next call does not count as the first under this policy.
                record_of(layer).chosen = policy
        # No Keras policy makes a layer read bfloat16 weights in float32.
        scope = contextlib.nullcontext()
        if has_bfloat16(model.weights):
            scope = private.AutocastScope("float32")
        with scope:
            yield
    finally:
        before.put_back()


def computes_in_half(layer: Layer) -> bool:
    return policy_of(layer).compute_dtype in HALF


def half_in_float32(layer: Layer) -> keras.DTypePolicy | None:
    """Chooses float32 for every layer that computes in half precision."""
    return FLOAT32 if computes_in_half(layer) else None
