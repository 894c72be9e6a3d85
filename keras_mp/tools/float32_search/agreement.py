"""Does what a model computes in half precision agree with what float32 computes?"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

import keras_mp.keras_private as private
from keras_mp.backends.differentiation import Gradients
from keras_mp.backends.random_draws import same_draws_in_every_dtype
from keras_mp.loss_scaling.one_batch import gradients_of
from keras_mp.policies.paths import variable_path
from keras_mp.tools.calls import results_through
from keras_mp.tools.temporary_policies import is_in_half
from keras_mp.types import Model

# How many times the error from rounding counts as agreement: healthy models stay below
# 2.5 times.
TOLERANCE = 4.0
# Allows every finite error.
ANY = float(np.finfo("float64").max)
# How many times everything is rounded, each time at random.
_ROUNDINGS = 3
# A quantity that rounding changes by more than this share is not compared: the gradient
# by a bias before a normalization is nothing but rounding errors, in any dtype.
_UNDETERMINED = 0.5
# The unit roundoff: the largest relative change when a number is rounded.
_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


class Quantity(NamedTuple):
    """An output, the loss, or an unscaled gradient, as a NumPy array."""

    name: str
    values: np.ndarray


class Error(NamedTuple):
    """How far a quantity is from float32's.

    Attributes:
        name: "output", "output 2", "loss", or the path of a layer or variable.
        error: ||found - expected|| / ||expected||; inf if it is not finite.
        allowed: the largest error that counts as agreement.
    """

    name: str
    error: float
    allowed: float

    @property
    def agrees(self) -> bool:
        return self.error <= self.allowed


class Agreement(NamedTuple):
    """What float32 computes, and how far from it half precision may be.

    Half precision rounds weights and the outputs of layers. Random roundings like these
    change outputs and gradients even in float32, and no layer is to blame for that
    (Monte Carlo arithmetic; Parker 1997). A multiple of that error is allowed.
    """

    expected: list[Quantity]
    allowed: list[float]  # The largest error of each; ANY if it is not compared.

    @property
    def undetermined(self) -> list[str]:
        """The names of the quantities that are only checked for inf and nan."""
        pairs = zip(self.expected, self.allowed, strict=True)
        return [quantity.name for quantity, allowed in pairs if allowed == ANY]

    def errors(self, found: Sequence[Quantity]) -> list[Error]:
        """The errors of all quantities, the largest relative to its limit first."""
        return sorted(self.in_order(found), key=lambda e: -e.error / e.allowed)

    def in_order(self, found: Sequence[Quantity]) -> list[Error]:
        """The errors of those quantities that were found, in the order of float32's."""
        by_name = {quantity.name: quantity for quantity in found}
        return [
            Error(expected.name, _error(by_name[expected.name], expected), allowed)
            for expected, allowed in zip(self.expected, self.allowed, strict=True)
            if expected.name in by_name
        ]


def agreement(
    model: Model,
    compute: Callable[[], list[Quantity]],
    policy: str,
    half: set[int],
    tolerance: float = TOLERANCE,
) -> Agreement:
    """Measures what float32 computes; all layers must have the policy float32.

    `compute` runs one batch, and `half` has the ids of the layers that will compute in
    half precision under the policy. Raises a ValueError if something is not finite in
    float32.
    """
    expected = compute()
    for quantity in expected:
        if not np.isfinite(quantity.values).all():
            raise ValueError(
                "`model` must be finite in float32. Received: a model and a batch "
                f"whose {quantity.name} is not. keras_mp.diagnose says where that "
                "begins."
            )
    roundoff = _ROUNDOFF[policy.removeprefix("mixed_")]
    change = np.full(len(expected), roundoff)
    for number in range(_ROUNDINGS):
        rounding = _Rounding(roundoff, half, number)
        with rounding.of_weights(model), results_through(rounding.of_result):
            found = {quantity.name: quantity for quantity in compute()}
        moved = [
            _error(found.get(quantity.name, quantity), quantity)
            for quantity in expected
        ]
        change = np.maximum(change, moved)
    allowed = [
        tolerance * x if x <= _UNDETERMINED and quantity.values.any() else ANY
        for x, quantity in zip(change.tolist(), expected, strict=True)
    ]
    return Agreement(expected, allowed)


class _Rounding:
    """Changes numbers as rounding does: x (1 + d), with |d| at most the roundoff."""

    def __init__(self, roundoff: float, half: set[int], seed: int) -> None:
        self._roundoff, self._half = roundoff, half
        self._random = np.random.default_rng(seed)

    def of_result(self, operation: Any, x: Any) -> Any:
        shape = getattr(x, "shape", (None,))
        if None in shape or not is_in_half(operation, self._half):
            return x
        if not keras.backend.is_float_dtype(keras.backend.standardize_dtype(x.dtype)):
            return x
        return x * ops.cast(self._factors(shape), x.dtype)

    @contextlib.contextmanager
    def of_weights(self, model: Model) -> Iterator[None]:
        weights = [
            variable
            for layer in private.layers_in(model)
            if id(layer) in self._half
            for variable in private.own_trainable(layer)
            if keras.backend.is_float_dtype(variable.dtype)
        ]
        before = [ops.convert_to_numpy(v) for v in weights]
        try:
            for variable, value in zip(weights, before, strict=True):
                variable.assign(value * self._factors(value.shape))
            yield
        finally:
            for variable, value in zip(weights, before, strict=True):
                variable.assign(value)

    def _factors(self, shape: Any) -> np.ndarray:
        moved = self._random.uniform(-self._roundoff, self._roundoff, tuple(shape))
        return (1 + moved).astype("float32")


def step(model: Model, batch: tuple[Any, Any, Any], scale: float) -> list[Quantity]:
    """Outputs and unscaled gradients of one batch; see `gradients_of`."""
    with same_draws_in_every_dtype():
        # Not compiled: each choice of layers would be compiled again.
        found = gradients_of(model, batch, scale)
    gradients = zip(model.trainable_variables, found.by_variable, strict=True)
    return [
        *outputs_of(found),
        *(Quantity(variable_path(v), g / scale) for v, g in gradients if g is not None),
    ]


def outputs_of(found: Gradients) -> list[Quantity]:
    """The outputs of a model."""
    return [
        Quantity(f"output {number}" if number > 1 else "output", values)
        for number, values in enumerate(found.seen, start=1)
    ]


def _error(found: Quantity, expected: Quantity) -> float:
    if not np.isfinite(found.values).all():
        return float("inf")
    wide = expected.values.astype("float64")
    apart = float(np.linalg.norm(found.values.astype("float64") - wide))
    size = float(np.linalg.norm(wide))
    return apart / size if size else float(np.inf if apart else 0.0)
