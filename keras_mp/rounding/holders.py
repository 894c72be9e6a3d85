"""Which wrapper holds an optimizer."""

import weakref
from typing import Any

import keras_mp.keras_private as private

# By the optimizer within. Weak on both ends.
_holders: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def hold(wrapper: Any, inner_optimizer: Any) -> None:
    """Notes that `wrapper` holds `inner_optimizer`."""
    _holders[inner_optimizer] = weakref.ref(wrapper)


def wrapper_of(optimizer: Any, kind: type) -> Any:
    """The living wrapper of a kind that holds `optimizer`, if there is one."""
    holder = _holders.get(optimizer)
    wrapper = holder() if holder is not None else None
    return wrapper if isinstance(wrapper, kind) else None


def wrapped(optimizer: Any, kind: type) -> Any:
    """The optimizer in a wrapper of a kind, and in the same one as before.

    Compiled with the same optimizer again, a model keeps what the wrapper knows.
    """
    wrapper = wrapper_of(optimizer, kind) or kind(optimizer)
    if optimizer.built and not wrapper.built:
        wrapper.build(private.own_trainable(optimizer))
    return wrapper
