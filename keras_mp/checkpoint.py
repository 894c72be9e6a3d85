"""How a scaled optimizer stands in a file.

Under the numbers 0, 1, ... what Keras' own wrapper writes, in its order: its variables,
the loss scale among them, then the inner optimizer's. Under their names the counters
that only we have. So Keras' checkpoints are ours without these.
"""

from typing import Any

import numpy as np


def save(optimizer: Any, store: Any) -> None:
    """Writes the variables of a `LossScaleOptimizer` into a Keras store (a mapping)."""
    numbered, named = _layout(optimizer)
    for index, variable in enumerate(numbered):
        store[str(index)] = variable.numpy()
    for variable in named:
        store[variable.name] = variable.numpy()


def load(optimizer: Any, store: Any) -> bool:
    """Reads them again; returns False, having changed nothing, if they do not fit."""
    numbered, named = _layout(optimizer)
    found = [v.name for v in named if v.name in store.keys()]
    count = len(store.keys()) - len(found)
    if not found and count == len(optimizer.inner_optimizer.variables):
        # Saved before the optimizer was wrapped: the scale starts anew.
        optimizer.inner_optimizer.load_own_variables(store)
        return True
    if count != len(numbered):
        return False
    for index, variable in enumerate(numbered):
        value = np.asarray(store[str(index)])
        if variable is optimizer.dynamic_scale:  # Keras' knows no bounds.
            rule = optimizer.rule
            value = np.clip(value, rule.min_scale, rule.max_scale)
        variable.assign(value)
    for variable in named:
        known = variable.name in found
        variable.assign(store[variable.name] if known else np.zeros(variable.shape))
    return True


def _layout(optimizer: Any) -> tuple[list[Any], list[Any]]:
    """The variables under numbers, and those under their names."""
    named = [
        optimizer.skip_counter,
        optimizer.consecutive_skip_counter,
        optimizer.broken_counter,
        *([optimizer.nonfinite_counts] if optimizer.built else []),
    ]
    names = {id(v) for v in named}
    return [v for v in optimizer.variables if id(v) not in names], named
