"""An optimizer reads its state from a file, whichever wrapper was round its writer.

Keras stores an optimizer's variables under the keys 0, 1, ... and skips a file with
another number of keys. A wrapper writes scalars of its own first, then the variables of
the optimizer that it holds:

    LossScaleOptimizer, Keras' or ours    4: Keras' two of each optimizer, the counter
                                             of finite steps, the loss scale
    StochasticRoundingOptimizer           1: the seed
    the first round the second            5

Our counters have names. So what an optimizer needs is at the end of the numbers, and a
run resumes under a policy that needs another wrapper, or none.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_mp.messages import warn, warnings_at_the_user
from keras_mp.rounding.optimizer import StochasticRoundingOptimizer
from keras_mp.types import Optimizer

# The name under which our LossScaleOptimizer stores its number of entries.
ENTRIES = "entries"
_SCALARS_BEFORE = (0, 1, 4, 5)


def wrap_load(original: Callable) -> Callable:
    """Wraps how an optimizer is read from a file."""

    def load_own_variables(self: Any, store: Any) -> None:
        _load(self, store, functools.partial(original, self))

    return load_own_variables


def _load(
    optimizer: Optimizer, store: Any, load_by_number: Callable[[Any], None]
) -> None:
    """Loads an optimizer by Keras' method, from a file of any wrapper."""
    keys, count = set(store.keys()), len(optimizer.variables)
    if keys == _first(count):
        load_by_number(store)
        return
    if keys == {ENTRIES} and not int(optimizer.iterations):
        return  # Neither of them has been trained.
    found = entries_for(optimizer, store)
    if found is not None:
        load_by_number(found)
    elif ENTRIES in keys:
        # Keras' method counts the names as well, and may find as many as it needs.
        warn_of_another(optimizer, count, len(_numbers(keys)))
    else:
        with warnings_at_the_user():
            load_by_number(store)


def entries_for(optimizer: Optimizer, store: Any) -> dict[str, np.ndarray] | None:
    """The entries by the optimizer's own numbers; None if another kind wrote them.

    Kinds are told apart by the shapes of all entries, and by the first: each optimizer
    starts with its iterations, an integer. A seed that the file lacks stays.
    """
    held, numbers = _held(optimizer), _numbers(store.keys())
    before = len(numbers) - len(held)
    if before not in _SCALARS_BEFORE or numbers != _first(len(numbers)):
        return None
    values = [np.asarray(store[str(i)]) for i in range(len(numbers))]
    shapes = [()] * before + [tuple(v.shape) for v in held]
    if [v.shape for v in values] != shapes or values[before].dtype.kind not in "iu":
        return None
    own = optimizer.variables[: len(optimizer.variables) - len(held)]
    kept = [keras.ops.convert_to_numpy(v) for v in own]
    return {str(i): value for i, value in enumerate(kept + values[before:])}


def warn_of_another(optimizer: Optimizer, expected: int, found: int) -> None:
    """Warns in Keras' words that the file of another optimizer is skipped."""
    warn(
        f"Skipping variable loading for optimizer '{optimizer.name}', because it "
        f"has {expected} variables whereas the saved optimizer has {found} variables. "
        + ("" if optimizer.built else "It has not been built yet.")
    )


def _held(optimizer: Optimizer) -> list[Any]:
    """The variables without the seed."""
    is_rounding = isinstance(optimizer, StochasticRoundingOptimizer)
    return (optimizer.inner_optimizer if is_rounding else optimizer).variables


def _first(count: int) -> set[str]:
    return {str(i) for i in range(count)}


def _numbers(keys: Any) -> set[str]:
    return {key for key in keys if key.isdecimal()}
