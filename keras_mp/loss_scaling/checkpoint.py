"""How a scaled optimizer is stored in a file.

The keys 0, 1, ... hold what Keras' own wrapper writes, in its order: its variables, the
loss scale among them, then the inner optimizer's. The counters that only we have are
stored under their names, and so is the number of entries.

A checkpoint is read whole and checked before anything is assigned. It is

    another optimizer's    if its numbers run from 0 without a gap, but to another end:
                           Keras warns and goes on, and so do we;
    of other variables     if only the counts by variable have another length. An
                           optimizer without momentum has no slots that show it: Keras
                           loads it, and so do we, with new counts and a warning;
    damaged                if no optimizer of this shape can have written it: a gap in
                           the numbers, more or fewer entries than it says it has, an
                           array of another shape, a counter below 0, a scale that the
                           writer's rule cannot reach. That is a ValueError.

Our rule keeps the scale positive and finite. Keras' rule doubles and halves it for
ever, up to inf and down to 0: a Keras checkpoint may hold these, and training resumes
at the nearest bound, as it does from any scale beyond the bounds. Neither rule writes a
nan or a negative scale. Moments that are not finite are left as they are: an optimizer
without loss scaling can produce them.
"""

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from keras_mp.loss_scaling.resuming import ENTRIES, entries_for, warn_of_another
from keras_mp.loss_scaling.state import LossScaling
from keras_mp.messages import warn
from keras_mp.types import Optimizer, Variable

# Counts go on from here at most: beyond 2**31 - 1 they would turn negative.
_MOST_COUNTED = 2**30
_NAMES = ("skipped_steps", "consecutive_skips", "broken_steps", "nonfinite_counts")


def save(optimizer: Optimizer, scaling: LossScaling, store: Any) -> None:
    """Writes the variables of a `LossScaleOptimizer` into a Keras store (a mapping)."""
    layout = _layout(optimizer, scaling)
    for key, variable in layout.items():
        store[key] = variable.numpy()
    store[ENTRIES] = np.array(len(layout))


def load(optimizer: Optimizer, scaling: LossScaling, store: Any) -> bool:
    """Reads them again, all or none.

    Returns:
        Whether the inner optimizer has entries of its own elsewhere in the file, as
        Keras writes them; not if it was saved before it was wrapped, or built.

    Raises:
        ValueError: if the checkpoint is damaged.
    """
    keys = set(store.keys())
    _check_keys(optimizer, store, keys)
    if keys == {ENTRIES} and not int(optimizer.iterations):
        return False  # Neither of them has been trained.
    inner = optimizer.inner_optimizer
    plain = _numbered(inner.variables)
    unscaled = store if keys == set(plain) else None
    if abs(len(keys) - len(plain)) == 1:  # With a seed more, or less.
        unscaled = entries_for(inner, store)
    if unscaled is not None:
        # The scale starts anew.
        _values(optimizer, scaling, unscaled, plain)
        inner.load_own_variables(unscaled)
        return False
    layout = _layout(optimizer, scaling)
    expected, found = ({k for k in of if k.isdecimal()} for of in (layout, keys))
    if found != expected or not keys - found <= {*_NAMES, ENTRIES}:
        # Keras' words, but not its method, which counts our names as well, and loads by
        # number if the sums happen to agree.
        warn_of_another(optimizer, len(expected), len(found))
        return True
    keys -= _counts_of_other_variables(optimizer, scaling, store, keys)
    present = {key: variable for key, variable in layout.items() if key in keys}
    values = _values(optimizer, scaling, store, present)
    for key, variable in layout.items():
        # A Keras checkpoint, or an older one of ours, lacks some counters.
        variable.assign(values.get(key, np.zeros(variable.shape)))
    return True


def _counts_of_other_variables(
    optimizer: Optimizer, scaling: LossScaling, store: Any, keys: set[str]
) -> set[str]:
    """The key of the counts by variable, if the writer had more or fewer variables."""
    counts: Any = scaling.nonfinite_counts
    shape = np.shape(store[counts.name]) if counts.name in keys else counts.shape
    if len(shape) != 2 or shape[0] != counts.shape[0] or shape == tuple(counts.shape):
        return set()
    warn(
        f"Optimizer '{optimizer.name}' has {counts.shape[1]} variables to train, "
        f"whereas the saved optimizer has {shape[1]}. The counts of their gradients "
        "that were not finite start anew; everything else is loaded."
    )
    return {counts.name}


def _layout(optimizer: Optimizer, scaling: LossScaling) -> dict[str, Any]:
    """The variables by their keys in a file.

    Empty before it is built. Keras compares only the number of entries: a few of ours
    could be as many as another optimizer has variables, of other shapes.
    """
    if not optimizer.built:
        return {}
    named = {name: getattr(scaling, name) for name in _NAMES}
    ids = {id(v) for v in named.values()}
    return _numbered(v for v in optimizer.variables if id(v) not in ids) | named


def _numbered(variables: Iterable[Variable]) -> dict[str, Any]:
    return {str(index): variable for index, variable in enumerate(variables)}


def _check_keys(optimizer: Optimizer, store: Any, keys: set[str]) -> None:
    numbers = {k for k in keys if k.isdecimal()}
    gap = {str(i) for i in range(len(numbers))} - numbers
    found = f"{len(numbers)} numbered entries without {', '.join(sorted(gap))}"
    _check(optimizer, not gap, "hold entries numbered from 0 without a gap", found)
    if ENTRIES in keys:
        written, present = store[ENTRIES], len(keys) - 1
        complete = np.array_equal(written, present)
        rule = f"hold the {written} entries that it was saved with"
        _check(optimizer, complete, rule, f"{present} entries")


def _values(
    optimizer: Optimizer, scaling: LossScaling, store: Any, layout: dict[str, Any]
) -> dict[str, np.ndarray]:
    """The entries of a checkpoint, checked."""
    inner = {id(v) for v in optimizer.inner_optimizer.variables}
    ours = not {ENTRIES, *_NAMES}.isdisjoint(store.keys())
    values = {}
    valid: Any
    for key, variable in layout.items():
        value, shape = np.asarray(store[key]), tuple(variable.shape)
        what = f"in entry '{key}', {variable.path},"
        fits = value.shape == shape and value.dtype.kind not in "OSU"
        found = f"{value.dtype} of shape {value.shape}"
        _check(optimizer, fits, f"hold {what} numbers of shape {shape}", found)
        counts = (
            keras.backend.is_int_dtype(variable.dtype) and id(variable) not in inner
        )
        if counts or variable is optimizer.iterations:
            valid = value.dtype.kind in "iuf" and np.all((0 <= value) & (value < 2**31))
            _check(optimizer, valid, f"hold {what} counts of at least 0", value)
            if variable is not optimizer.iterations:
                value = np.minimum(value, _MOST_COUNTED)
        if variable is scaling.scale:
            valid = 0 < value < np.inf if ours else value >= 0
            positive = f"hold {what} a scale that is positive and finite"
            _check(optimizer, valid, positive, value)
            rule = scaling.rule  # Its bounds may differ from the writer's.
            value = np.clip(value, rule.min_scale, rule.max_scale)
        values[key] = value
    return values


def _check(optimizer: Optimizer, holds: Any, rule: str, received: Any) -> None:
    if holds:
        return
    raise ValueError(
        f"The checkpoint of optimizer '{optimizer.name}' must {rule}. Received: "
        f"{received}. It is damaged, or of another model, and nothing of it was loaded "
        "into the optimizer. Load another copy; or go on from the weights alone, with "
        "`load_model(path, compile=False)` or `load_weights(path, "
        "objects_to_skip=[model.optimizer])`."
    )
