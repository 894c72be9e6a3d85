"""Which wrapper holds an optimizer."""

import weakref
from typing import Any

import keras_mp.keras_private as private
from keras_mp.types import Optimizer

# Inner optimizer -> its wrapper. Both references are weak.
_holders: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def hold(wrapper: Any, inner_optimizer: Optimizer) -> None:
    """Notes that `wrapper` holds `inner_optimizer`."""
    _holders[inner_optimizer] = weakref.ref(wrapper)


def wrapper_of(optimizer: Optimizer, kind: type) -> Any:
    """The living wrapper of a kind that holds `optimizer`, if there is one."""
    holder = _holders.get(optimizer)
    wrapper = holder() if holder is not None else None
    return wrapper if isinstance(wrapper, kind) else None


def wrapped(optimizer: Optimizer, kind: type) -> Any:
    """The optimizer in a wrapper of a kind, the same wrapper as before if there is one.

    A model that is compiled again with the same optimizer keeps the wrapper's state.
    """
    wrapper = wrapper_of(optimizer, kind) or kind(optimizer)
    if optimizer.built and not wrapper.built:
        wrapper.build(private.own_trainable(optimizer))
    return wrapper
