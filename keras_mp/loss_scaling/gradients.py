"""Gradients on their way from the backward pass into the inner optimizer."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_mp.backends import engine
from keras_mp.loss_scaling.global_norm import clips_by_global_norm, squares


def divided(
    grads: Sequence[Any], variables: Sequence[Any], scale: Any, in_place: bool = False
) -> list[Any]:
    """Gradients divided by the scale, in float32; `in_place` where torch can."""
    unscaled = engine.unscale(
        [None if _overwrites(v) else g for g, v in zip(grads, variables, strict=True)],
        ops.divide(1.0, scale),
        variables if in_place else None,
    )
    return [
        g if _overwrites(v) else u
        for g, v, u in zip(grads, variables, unscaled, strict=True)
    ]


def narrowed(grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Gradients in the dtype of float16 and bfloat16 variables, others as they are.

    Keras' optimizers cast them so, and what was finite may then not be.
    """
    dtypes = [_narrow_dtype(v) for v in variables]
    return [
        ops.cast(g, d) if d and g is not None else g
        for g, d in zip(grads, dtypes, strict=True)
    ]


def stay_finite(variables: Sequence[Any], inner: Any, min_scale: float) -> bool:
    """Whether gradients that are finite are so once they are divided, and cast.

    Nothing else is looked at then: not their squares, for global clipping.
    """
    narrow = any(_narrow_dtype(v) for v in variables)
    return min_scale >= 1 and not narrow and not clips_by_global_norm(inner)


def to_look_at(
    grads: Sequence[Any], variables: Sequence[Any], inner: Any
) -> tuple[Sequence[Any], Any]:
    """What tells whether gradients are finite: they themselves, or their squares.

    The second is the square of their norm, or None.
    """
    clipped = clips_by_global_norm(inner) and all(
        g is None
        or (
            getattr(g, "dense_shape", None) is None
            and keras.backend.standardize_dtype(g.dtype) == "float32"
            and not _overwrites(v)
        )
        for g, v in zip(grads, variables, strict=True)
    )
    return squares(grads) if clipped else (grads, None)


def _overwrites(variable: Any) -> bool:
    """Whether its "gradient" is its next value (float8 scales): no scale is in it."""
    return getattr(variable, "overwrite_with_gradient", False)


def _narrow_dtype(variable: Any) -> str | None:
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return dtype if dtype in ("float16", "bfloat16") else None
