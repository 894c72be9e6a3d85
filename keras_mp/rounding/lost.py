"""Warns of an optimizer that loses part of its updates to bfloat16 weights."""

import weakref
from collections.abc import Sequence
from typing import Any

import keras_mp.keras_private as private
from keras_mp.backends.interface import BFLOAT16
from keras_mp.messages import warn
from keras_mp.types import Optimizer

# From here on a number below 1 is rounded to 1.
_BECOMES_ONE = 1 - 2.0**-9
# The optimizers that were looked at.
seen: weakref.WeakSet = weakref.WeakSet()


def look(optimizer: Optimizer, variables: Sequence[Any] | None) -> None:
    """Warns once of an optimizer that is about to update bfloat16 weights.

    Inside a `StochasticRoundingOptimizer` these weights report float32.

    Args:
        optimizer: a Keras optimizer.
        variables: what it updates; None for those that it was built with.
    """
    if optimizer in seen:
        return
    seen.add(optimizer)
    updated = variables or private.own_trainable(optimizer)
    paths = [getattr(v, "path", v.name) for v in updated if v.dtype == BFLOAT16]
    if paths:
        warn(
            f"Optimizer {optimizer.name!r} updates bfloat16 weights ({paths[0]} and "
            f"{len(paths) - 1} more): {_lost(optimizer)}. Compile with "
            "`keras_mp.StochasticRoundingOptimizer(optimizer)`, or train under "
            '"mixed_bfloat16".'
        )


def _lost(optimizer: Optimizer) -> str:
    beta_2 = getattr(optimizer, "beta_2", None)
    if isinstance(beta_2, float) and _BECOMES_ONE <= beta_2 < 1:
        return f"beta_2={beta_2} is 1 in bfloat16, and its steps are 0, or nan"
    return "an update of less than 1/512 of its weight is lost"
