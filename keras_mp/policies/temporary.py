"""The layers of a model under other policies for a while."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_mp.keras_seams import private
from keras_mp.policies.layers import policy_of
from keras_mp.policies.policy import FLOAT32, HALF

# What a layer remembers of its policy.
_CHANGED = (private.DTYPE_POLICY, "_keras_mp_decision", "_keras_mp_chosen")

# Layer -> its policy, or None for the one that it has.
Choice = Callable[[Any], keras.DTypePolicy | None]


@contextlib.contextmanager
def temporary_policies(model: Any, choose: Choice) -> Iterator[None]:
    """Lets the layers of a model compute under other policies for a while."""
    layers = private.layers_in(model)
    before = [
        (vars(x), {k: vars(x)[k] for k in _CHANGED if k in vars(x)}) for x in layers
    ]
    try:
        for layer, policy in [(x, choose(x)) for x in layers]:
            if policy is not None and layer.quantization_mode is None:
                # The public setter would write into a map that other layers share.
                private.set_policy(layer, policy)
                # Its next call is not taken for the first under this policy.
                vars(layer)["_keras_mp_chosen"] = policy
        yield
    finally:
        for attributes, values in before:
            for name in _CHANGED:
                attributes.pop(name, None)
            attributes.update(values)


def computes_in_half(layer: Any) -> bool:
    return policy_of(layer).compute_dtype in HALF


def half_in_float32(layer: Any) -> keras.DTypePolicy | None:
    """Chooses float32 for every layer that computes in half precision."""
    return FLOAT32 if computes_in_half(layer) else None
