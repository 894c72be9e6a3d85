"""Loss scaling on JAX: selects where each variable is written, no conditional."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax

from keras_mp.backend.codes import FINITE, NAN
from keras_mp.backend.logs import (
    any_measured,
    loss_is_finite,
    with_scale,
    without_step,
)
from keras_mp.backend.selects import without_conditionals
from keras_mp.backend.train_function import make_train_function
from keras_mp.backend.windows import in_windows

__all__ = [
    "all_finite",
    "build",
    "check_strategy",
    "compiled",
    "is_tracing",
    "make_train_function",
    "nonfinite",
    "optimizer_scope",
    "optimizer_values",
    "outside_trace",
    "poison",
    "refuse_baking",
    "undo_skipped",
    "unscale",
    "update_if",
]

# Gradients up to this many elements are checked together, so that the number of
# kernels does not grow with the number of variables.
GROUPED_ELEMENTS = 64 * 1024
GRADIENTS_IN_A_WORD = 15  # Two bits for each; the sign is left alone.
# Fewer than this of one shape are checked one by one, unless they are as small as this.
FEW, SMALL_ELEMENTS = 8, 1024


def is_tracing() -> bool:
    """Whether we are inside jax.jit (eager jax.grad does not count)."""
    # What JAX creates is a tracer only where a program is being recorded: jax.grad
    # outside jit computes such constants at once. This one takes the least time.
    return isinstance(lax.iota(np.int32, 1), jax.core.Tracer)


def compiled(function: Callable, static: Sequence[int] = ()) -> Callable:
    """A function of a few small tensors, element by element, as one program.

    Where several results are traced for CPUs, as one kernel: XLA would compile each on
    its own, and takes as long for a scalar as for any other. What it calls, and is told
    is small, it compiles as a whole. It knows no reductions there; and a single result
    that is large it divides among threads, which then cannot be called.

    `static`: the places of arguments that are no tensors.
    """
    jitted = jax.jit(function, static_argnums=static)

    def call(*args: Any) -> Any:
        results = jitted(*args)
        leaves, tree = jax.tree.flatten(results)
        traced = isinstance(leaves[0], jax.core.Tracer) and is_tracing()
        if not traced or len(leaves) == 1 or jax.default_backend() != "cpu":
            return results
        from jax.experimental.xla_metadata import set_xla_metadata  # Keras does not.

        # The call is known by a result that it has computed.
        leaves[0] = set_xla_metadata(leaves[0], **_SMALL_CALL)
        return tree.unflatten(leaves)

    return call


_SMALL_CALL = {"inlineable": "false", "xla_cpu_small_call": "true"}


def outside_trace() -> contextlib.AbstractContextManager:
    """Where variables are given their first values; JAX creates none in a trace."""
    return contextlib.nullcontext()


def refuse_baking(what: str, remedy: str) -> None:
    """Raises where the variables' present values would become constants of a trace."""
    if not keras.src.backend.in_stateless_scope() and is_tracing():
        raise ValueError(
            f"`{what}` was called inside a function that JAX is tracing: the present "
            "loss scale would be baked into the program and never move again. "
            f"Call `{remedy}` instead."
        )


def check_strategy(variables: Sequence[Any], built: bool) -> None:
    """Nothing to check: only TensorFlow has strategies."""


def optimizer_scope(model: Any) -> contextlib.AbstractContextManager:
    """No scope: only TensorFlow has strategies."""
    return contextlib.nullcontext()


def unscale(
    grads: Sequence[Any], inverse_scale: Any, variables: Sequence[Any] | None = None
) -> list[Any]:
    """Multiplies each gradient by `inverse_scale` in float32; None stays None."""
    return _map_present(_unscale, grads, inverse_scale)


@jax.jit
def _unscale(grads: list[Any], inverse_scale: Any) -> list[Any]:
    wide = [lax.convert_element_type(g, _wide_dtype(g)) for g in grads]
    # Once for each shape: XLA reads every line.
    alike = dict.fromkeys((g.shape, g.dtype) for g in wide)
    inverse = {(s, d): lax.broadcast(inverse_scale.astype(d), s) for s, d in alike}
    return [lax.mul(g, inverse[g.shape, g.dtype]) for g in wide]


def poison(grads: Sequence[Any]) -> list[Any]:
    """Turns infinities into nan, which clipping by value cannot make finite again."""
    return _map_present(_poison, grads)


@jax.jit
def _poison(grads: list[Any]) -> list[Any]:
    return [jnp.where(jnp.isfinite(g), g, jnp.nan) for g in grads]


def _map_present(
    function: Callable[..., list[Any]], grads: Sequence[Any], *args: Any
) -> list[Any]:
    """Applies a function of a list to those gradients that are not None."""
    results = iter(function([g for g in grads if g is not None], *args))
    return [None if g is None else next(results) for g in grads]


def _wide_dtype(x: Any) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def nonfinite(grads: Sequence[Any]) -> Any:
    """The code of each gradient, of FINITE, INFINITE and NAN: int8, (len(grads),).

    Outside a trace a NumPy array: whether to write is decided there in Python.
    """
    codes = _nonfinite(list(grads))
    return codes if isinstance(codes, jax.core.Tracer) else np.asarray(codes)


@jax.jit
def _nonfinite(grads: list[Any]) -> Any:
    alike: dict[Any, list[int]] = {}
    for index, grad in enumerate(grads):
        if grad is not None:
            small = grad.size <= GROUPED_ELEMENTS
            kind = grad.shape, grad.dtype, jax.typeof(grad).sharding
            key = kind if small else index
            alike.setdefault(key, []).append(index)
    for key, indices in list(alike.items()):
        # The words of a few are nearly as large as they are.
        if len(indices) < FEW and grads[indices[0]].size > SMALL_ELEMENTS:
            del alike[key]
            alike.update({i: [i] for i in indices})
    codes = [_codes([grads[i] for i in indices]) for indices in alike.values()]
    missing = [index for index, grad in enumerate(grads) if grad is None]
    codes.append(lax.full((len(missing),), np.int8(FINITE)))
    order = np.argsort([i for indices in (*alike.values(), missing) for i in indices])
    return lax.concatenate(codes, 0).at[order].get(mode="promise_in_bounds")


def _codes(grads: list[Any]) -> Any:
    """The code of each gradient, of one shape: is it finite, or what does it hold?

    Several share words of 32 bits, one word for each place in their shape and two bits
    for each gradient, so that one kernel reads them all, once, and copies none.
    """
    if len(grads) == 1:
        return _largest(_bits(grads[0])[np.newaxis], _code)
    number = -(-len(grads) // GRADIENTS_IN_A_WORD)
    lanes, shape = -(-len(grads) // number), grads[0].shape
    # As many in each, some of them twice: all words of a shape are then one kernel.
    filled = [*grads, *grads[: number * lanes - len(grads)]]
    words = [_word(filled[i : i + lanes]) for i in range(0, len(filled), lanes)]
    places = 2 * np.arange(lanes, dtype=np.int32).reshape(-1, *[1] * len(shape))
    codes = jnp.stack(words)[:, np.newaxis] >> places & np.int32(3)
    rows = codes.reshape(len(words) * lanes, *shape)
    # A maximum, and no `or`, which collectives do not know.
    return _largest(rows, lambda code: code)[: len(grads)]


@jax.jit  # Traced once for each shape.
def _word(grads: list[Any]) -> Any:
    # Constants that stand there once: XLA reads every line.
    below, above = lax.full((), _BELOW), lax.full((), _ABOVE)
    two, largest = (lax.full(grads[0].shape, np.int32(x)) for x in (2, 2**31 - 1))
    word = lax.full(grads[0].shape, np.int32(0))
    for grad in reversed(grads):
        bits = lax.clamp(below, _bits(grad), above)
        word = lax.add(lax.shift_left(word, two), bits)
    # Each code is still too large by `_BELOW`. Integers wrap round.
    excess = sum(int(_BELOW) << 2 * i for i in range(len(grads))) & 0xFFFFFFFF
    word = lax.sub(word, lax.full_like(word, np.uint32(excess).astype(np.int32)))
    # The remainder is the word itself. It keeps XLA from computing the word once more
    # for each of its gradients.
    return lax.rem(word, largest)


def _bits(x: Any) -> Any:
    # The bits of |x| order as integers do: infinity above all numbers, nan above it.
    # An integer maximum, unlike one of floats, cannot lose a nan.
    if x.dtype == jnp.float64:  # A large one would become infinite in float32.
        x = jnp.where(jnp.isfinite(x), 0, x)
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    # No `abs`, which XLA leaves out of that of a square: the sign of a nan would stay.
    return bits & np.int32(0x7FFFFFFF)


def _code(bits: Any) -> Any:
    return lax.clamp(_BELOW, bits, _ABOVE) - _BELOW


def _largest(rows: Any, code: Callable[[Any], Any]) -> Any:
    """The largest code of each row, int8."""
    if parted := in_windows(rows.shape, first=1):
        shape, axis = parted
        rows = lax.reduce(rows.reshape(shape), np.int32(0), lax.max, (axis,))
    codes = code(rows).astype(jnp.int8)
    return lax.reduce(codes, np.int8(0), lax.max, tuple(range(1, codes.ndim)))


# The bits of the largest number, and as far above as NAN is above FINITE.
_BELOW = np.int32(0x7F7FFFFF)
_ABOVE = np.int32(_BELOW + NAN)


def all_finite(codes: Any) -> Any:
    """Bool scalar: is each of the codes FINITE?"""
    if not isinstance(codes, jax.core.Tracer):
        return not codes.any()
    # Where the highest code is: the first of the highest, and so before all others if
    # they are FINITE. This XLA leaves whole. A sum or a maximum it would part in three
    # kernels, or compute once more in each of the selects that read the flag.
    codes = lax.concatenate([lax.full((1,), codes.dtype.type(FINITE)), codes], 0)
    return lax.argmax(codes, 0, np.int32) == 0


class SelectingScope(keras.StatelessScope):
    """A stateless scope that writes only where `predicate` is true.

    Selecting at each write leaves no conditional in the program and no second copy of
    the state, wherever an optimizer writes from (`assign`, EMA, weight decay).
    """

    def __init__(self, predicate: Any, state_mapping: dict[int, Any]) -> None:
        super().__init__()
        # Once for each shape: XLA reads every line.
        self._predicate_for = functools.cache(
            functools.partial(lax.broadcast, predicate)
        )
        self._before = state_mapping
        self.state_mapping = dict(state_mapping)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        # As it was before any write: fewer values live on at the same time.
        kept = self._before.get(id(variable), variable.value)
        kept = lax.convert_element_type(kept, value.dtype)
        sharding = jax.typeof(value).sharding
        predicate = self._predicate_for(value.shape, out_sharding=sharding)
        super().add_update((variable, lax.select_n(predicate, kept, value)))


def update_if(
    finite: Any,
    update: Callable[[list[Any]], None],
    grads: list[Any],
    written: Callable[[], Sequence[Any] | None],
    branches: bool = False,
) -> None:
    """Runs `update(grads)`, whose writes take effect only if `finite`.

    `branches`: whether Keras puts conditionals into it, which then become selects.
    """
    if not isinstance(finite, jax.core.Tracer):
        if finite:
            update(grads)
        return

    def writes(finite: Any, before: dict[int, Any], grads: list[Any]) -> Any:
        with SelectingScope(finite, before) as scope:
            update(grads)
        return scope.state_mapping

    run = without_conditionals(writes) if branches else writes
    mapping = keras.src.backend.get_stateless_scope().state_mapping
    mapping.update(run(finite, mapping, grads))


def optimizer_values(args: Sequence[Any]) -> list[Any] | None:
    """The optimizer's state in the arguments of a `train_function`."""
    return args[0][2]


def undo_skipped(
    model: Any, optimizer: Any, step: Callable[..., tuple[Any, Any]]
) -> Callable[..., tuple[Any, Any]]:
    """Wraps a train step so that one which the optimizer skips leaves no trace.

    Non-trainable variables, metrics and the logs made of them are what they were, and
    so is the loss scale if the loss itself was not finite.
    """

    def undoing(state: Any, data: Any) -> tuple[Any, Any]:
        logs, after = step(state, data)
        place = {id(v): i for i, v in enumerate(optimizer.variables)}
        counter = place[id(optimizer.skip_counter)]
        skipped = after[2][counter] > state[2][counter]
        own = [place[id(v)] for v in optimizer.state_variables]
        blameless = optimizer.state_after_broken_step([state[2][i] for i in own])
        broken = skipped & ~loss_is_finite(logs)
        scaling = list(after[2])
        for index, value in zip(own, blameless, strict=True):
            scaling[index] = jnp.where(broken, value, scaling[index])
        non_trainable, metrics = (
            [
                # What the step did not write needs no select: frozen weights.
                new if new is old else jnp.where(skipped, old, new)
                for old, new in zip(state[part], after[part], strict=True)
            ]
            for part in (1, 3)
        )
        scope = zip(model.metrics_variables, metrics, strict=True)
        with keras.StatelessScope(list(scope)):
            results = model.get_metrics_result()
        logs = without_step(logs, results, skipped, any_measured(state[3]))
        scale = scaling[place[id(optimizer.dynamic_scale)]]
        underflow = optimizer.underflow_watch.take()
        logs = with_scale(model, logs, scale, scaling[counter], underflow)
        return logs, (after[0], non_trainable, scaling, metrics)

    return undoing


def build(model: Any, *args: Any) -> None:
    """Nothing to do: `fit` builds the model before the first step."""
