"""Gradients by what is computed on the way to a loss, on JAX."""

from collections.abc import Callable
from typing import Any

import jax
import keras


def differentiate(
    function: Callable, arguments: Any, variables: Any, state: Any, compiled: bool
) -> tuple[Any, list, list, list]:
    try:
        from jax.extend.core import get_opaque_trace_state  # Keras does not import it.
    except ImportError:  # JAX 0.8 and older have it here.
        from jax.core import get_opaque_trace_state

    ids = {id(v) for v in variables}
    others = [v for v in state if id(v) not in ids]

    def run(weights: list, zeros: list | None, values: list, arguments: Any) -> Any:
        seen: list[Any] = []
        trace = get_opaque_trace_state()

        def see(x: Any) -> tuple[Any, bool]:
            # What stands in a loop of its own must not leave it.
            here = get_opaque_trace_state() == trace and isinstance(x, jax.Array)
            if not (here and jax.numpy.issubdtype(x.dtype, jax.numpy.floating)):
                return x, False
            # The gradient by what is added is that by the sum.
            seen.append(x if zeros is None else x + zeros[len(seen)])
            return seen[-1], True

        mapping = zip([*variables, *others], [*weights, *values], strict=True)
        with keras.StatelessScope(list(mapping), collect_losses=True):
            loss = function(arguments, see)
        return loss, (loss, seen)

    weights, values = [v.value for v in variables], [v.value for v in others]
    _, (_, shapes) = jax.eval_shape(run, weights, None, values, arguments)
    zeros = [jax.numpy.zeros(s.shape, s.dtype) for s in shapes]
    gradient = jax.grad(run, argnums=(0, 1), has_aux=True)
    (by_variable, by_seen), (loss, seen) = (
        jax.jit(gradient) if compiled else gradient
    )(weights, zeros, values, arguments)
    return loss, seen, by_seen, by_variable
