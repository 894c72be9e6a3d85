"""Gradients on their way from the backward pass into the inner optimizer."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

import keras_mp.keras_private as private
from keras_mp.backends import engine
from keras_mp.policies.paths import variable_path
from keras_mp.types import Gradients, Optimizer, Tensor, Variable, Variables


def check(grads: Gradients, variables: Variables) -> None:
    """Raises a ValueError if a gradient does not fit its variable, or all are None."""
    if len(grads) != len(variables):
        raise ValueError(
            "`grads` must hold one gradient for each variable. Received: "
            f"{len(grads)} gradients for {len(variables)} variables."
        )
    if all(g is None for g in grads):
        raise ValueError(
            "No gradients provided for any variable: all of `grads` are None. "
            f"Received: grads of length {len(grads)}."
        )
    for grad, variable in zip(grads, variables, strict=True):
        if grad is not None and not _same_shape(_shape(grad), variable.shape):
            raise ValueError(
                "Each gradient must have the shape of its variable. Received: a "
                f"gradient of shape {tuple(_shape(grad))} for variable "
                f"{variable_path(variable)} of shape {tuple(variable.shape)}."
            )


def _shape(grad: Tensor) -> Any:
    # A sparse TensorFlow gradient may hold its shape as a tuple: then `.shape` fails.
    given = getattr(grad, "dense_shape", None)
    return given if isinstance(given, tuple) else grad.shape


def _same_shape(grad: Tensor, variable: Variable) -> bool:
    """Compares static shapes; an unknown dimension fits any."""
    if getattr(grad, "rank", 0) is None:
        return True
    grad, variable = tuple(grad), tuple(variable)
    return len(grad) == len(variable) and all(
        a is None or a == b for a, b in zip(grad, variable, strict=True)
    )


def unscaled(grads: Gradients, variables: Variables, scale: Tensor) -> list[Any]:
    """Gradients divided by the scale, in float32."""
    quotients = engine.unscale(
        [None if _overwrites(v) else g for g, v in zip(grads, variables, strict=True)],
        1.0 / scale,
    )
    return [
        g if _overwrites(v) else quotient
        for g, v, quotient in zip(grads, variables, quotients, strict=True)
    ]


def unscaled_in_place(
    grads: Gradients, variables: Variables, scale: Tensor
) -> tuple[list[Any], Any] | None:
    """See `Engine.unscale_in_place`; None where no gradient may change."""
    pure = private.get_stateless_scope() is not None
    if pure or any(_overwrites(v) for v in variables):
        return None
    return engine.unscale_in_place(grads, scale, variables)


def as_variables(grads: Gradients, variables: Variables) -> list[Any]:
    """Gradients in the dtype of float16 and bfloat16 variables, others as they are.

    Keras' optimizers cast them so, and a finite gradient may overflow there.
    """
    dtypes = [_half_dtype(v) for v in variables]
    return [
        ops.cast(g, dtype) if dtype and g is not None else g
        for g, dtype in zip(grads, dtypes, strict=True)
    ]


def stay_finite(variables: Variables, inner: Optimizer, min_scale: float) -> bool:
    """Whether finite gradients stay finite when they are unscaled, and cast.

    If so, they can be checked before they are unscaled. With global clipping their
    squares have to be finite, too.
    """
    half = any(_half_dtype(v) for v in variables)
    return min_scale >= 1 and not half and not _clips_by_global_norm(inner)


def checked_for(
    grads: Gradients, variables: Variables, inner: Optimizer
) -> tuple[Sequence[Any], Any]:
    """What shows whether gradients are finite: the gradients, or their squares.

    Global-norm clipping reads every gradient anyway: if it comes next, its sums of
    squares show it at no cost. Beyond 1.8e19 they overflow in float32, and so does
    Keras' norm: such a step has to be skipped, too.

    Returns:
        A list, one tensor for each gradient, and the square of their norm or None.
    """
    clips = _clips_by_global_norm(inner) and all(
        g is None
        or (
            getattr(g, "dense_shape", None) is None
            and keras.backend.standardize_dtype(g.dtype) == "float32"
            and not _overwrites(v)
        )
        for g, v in zip(grads, variables, strict=True)
    )
    if not clips:
        return grads, None
    # The same operations as in Keras' `clip_by_global_norm`: XLA computes them once.
    sums = [None if g is None else ops.sum(ops.square(g)) for g in grads]
    return sums, ops.sum(ops.stack([s for s in sums if s is not None]))


def _clips_by_global_norm(inner: Optimizer) -> bool:
    """Whether the next step takes the norm of these gradients, not of a sum of them."""
    return bool(
        getattr(inner, "global_clipnorm", None)
        and not inner.clipnorm
        and not inner.gradient_accumulation_steps
    )


def _overwrites(variable: Variable) -> bool:
    """Whether its "gradient" is its next value (float8 scales): it is not scaled."""
    return getattr(variable, "overwrite_with_gradient", False)


def _half_dtype(variable: Variable) -> str | None:
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return dtype if dtype in ("float16", "bfloat16") else None
