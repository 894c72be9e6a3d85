"""Gradients of a loss by variables and by what is computed on the way to it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

# Given a tensor on the way, returns it, or what is to take its place, and whether its
# gradient will be known.
See = Callable[[Any], tuple[Any, bool]]


class Gradients(NamedTuple):
    """What `differentiate` returns, as NumPy arrays of float32 or wider.

    Attributes:
        loss: the loss.
        seen: the tensors that were shown, in this order.
        by_seen: the gradient by each of them; None where the loss does not need it.
        by_variable: the gradient by each variable, or None.
    """

    loss: np.ndarray
    seen: list[np.ndarray]
    by_seen: list[np.ndarray | None]
    by_variable: list[np.ndarray | None]


def differentiate(
    function: Callable[[Any, See], Any],
    arguments: Any,
    variables: Sequence[Any],
    state: Sequence[Any],
    compiled: bool,
) -> Gradients:
    """Runs `function(arguments, see)` and differentiates the loss that it returns.

    Args:
        function: returns a scalar. It may call `see` with tensors on the way, and has
            to go on with what that returns. It may run more than once.
        arguments: tensors, or structures of them.
        variables: what the loss is differentiated by, too.
        state: all variables that `function` reads or writes. They stay as they were.
        compiled: whether to compile; only on JAX.
    """
    run = {"jax": _jax, "tensorflow": _tensorflow, "torch": _torch}
    before = [ops.copy(ops.stop_gradient(v.value)) for v in state]
    try:
        loss, *found = run[keras.backend.backend()](
            function, arguments, variables, state, compiled
        )
    finally:
        for variable, value in zip(state, before, strict=True):
            variable.assign(value)
    seen, by_seen, by_variable = ([_array(x) for x in tensors] for tensors in found)
    return Gradients(_array(loss), seen, by_seen, by_variable)


def _array(x: Any) -> Any:
    if x is None:
        return None
    dtype = keras.backend.standardize_dtype(x.dtype)
    wide = x if dtype in ("float32", "float64") else ops.cast(x, "float32")
    return ops.convert_to_numpy(wide)


def _is_float(x: Any) -> bool:
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(x.dtype))


def _jax(
    function: Callable, arguments: Any, variables: Any, state: Any, compiled: bool
) -> tuple[Any, list, list, list]:
    import jax
    from jax.extend.core import get_opaque_trace_state

    ids = {id(v) for v in variables}
    others = [v for v in state if id(v) not in ids]

    def run(weights: list, zeros: list | None, values: list, arguments: Any) -> Any:
        seen: list[Any] = []
        trace = get_opaque_trace_state()

        def see(x: Any) -> tuple[Any, bool]:
            # What stands in a loop of its own must not leave it.
            if get_opaque_trace_state() != trace or not isinstance(x, jax.Array):
                return x, False
            if not _is_float(x):
                return x, False
            # The gradient by what is added is that by the sum.
            seen.append(x if zeros is None else x + zeros[len(seen)])
            return seen[-1], True

        mapping = zip([*variables, *others], [*weights, *values], strict=True)
        with keras.StatelessScope(list(mapping)):
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


def _tensorflow(
    function: Callable, arguments: Any, variables: Any, state: Any, compiled: bool
) -> tuple[Any, list, list, list]:
    import tensorflow as tf

    seen: list[Any] = []

    def see(x: Any) -> tuple[Any, bool]:
        # What stands in a graph of its own must not leave it.
        if not (tf.executing_eagerly() and isinstance(x, tf.Tensor) and _is_float(x)):
            return x, False
        seen.append(x)
        return x, True

    with tf.GradientTape() as tape:
        loss = function(arguments, see)
    gradients = tape.gradient(loss, [*(v.value for v in variables), *seen])
    # Sparse ones, of an Embedding, become dense.
    gradients = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
    return loss, seen, gradients[len(variables) :], gradients[: len(variables)]


def _torch(
    function: Callable, arguments: Any, variables: Any, state: Any, compiled: bool
) -> tuple[Any, list, list, list]:
    import torch

    seen: list[Any] = []

    def see(x: Any) -> tuple[Any, bool]:
        # What is inside of torch.vmap must not leave it.
        inside = torch._C._functorch.is_functorch_wrapped_tensor
        if not isinstance(x, torch.Tensor) or inside(x) or not _is_float(x):
            return x, False
        seen.append(x)
        return x, True

    # A Dropout without a seed draws from torch's own generators.
    with torch.enable_grad(), torch.random.fork_rng():
        loss = function(arguments, see)
        wanted = [*(v.value for v in variables), *seen]
        asked = [i for i, x in enumerate(wanted) if x.requires_grad]
        gradients: list[Any] = [None] * len(wanted)
        # Of a frozen model there is nothing to differentiate by, or a loss of it
        # that depends on nothing.
        if asked and loss.requires_grad:
            inputs = [wanted[i] for i in asked]
            found = torch.autograd.grad(loss, inputs, allow_unused=True)
            for i, gradient in zip(asked, found, strict=True):
                gradients[i] = gradient
    seen = [x.detach() for x in seen]
    count = len(variables)
    return loss.detach(), seen, gradients[count:], gradients[:count]
