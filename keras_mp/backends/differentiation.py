"""Gradients of a loss by variables and by intermediate tensors."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_mp.backends import engine
from keras_mp.types import Tensor, Variables

# Takes an intermediate tensor; returns it, or its replacement, and whether its gradient
# will be known.
See = Callable[[Any], tuple[Any, bool]]


class Gradients(NamedTuple):
    """What `differentiate` returns, as NumPy arrays of float32 or wider.

    Attributes:
        loss: the loss.
        seen: the tensors that `see` was called with, in this order.
        by_seen: the gradient by each; None if the loss does not depend on it.
        by_variable: the gradient by each variable, or None.
    """

    loss: np.ndarray
    seen: list[np.ndarray]
    by_seen: list[np.ndarray | None]
    by_variable: list[np.ndarray | None]


def differentiate(
    function: Callable[[Any, See], Any],
    arguments: Any,
    variables: Variables,
    state: Sequence[Any],
    compiled: bool,
) -> Gradients:
    """Runs `function(arguments, see)` and differentiates the loss that it returns.

    Args:
        function: returns a scalar. It may call `see` with intermediate tensors, and
            must go on with what `see` returns. It may run more than once.
        arguments: tensors, or structures of them.
        variables: the loss is differentiated by these, too.
        state: all variables that `function` reads or writes. They keep their values.
        compiled: whether to compile; only on JAX.
    """
    before = [ops.copy(ops.stop_gradient(v.value)) for v in state]
    try:
        loss, *found = engine.differentiate(
            function, arguments, variables, state, compiled
        )
    finally:
        for variable, value in zip(state, before, strict=True):
            variable.assign(value)
    seen, by_seen, by_variable = ([_array(x) for x in tensors] for tensors in found)
    return Gradients(_array(loss), seen, by_seen, by_variable)


def _array(x: Tensor) -> Any:
    if x is None:
        return None
    dtype = keras.backend.standardize_dtype(x.dtype)
    wide = x if dtype in ("float32", "float64") else ops.cast(x, "float32")
    return ops.convert_to_numpy(wide)
