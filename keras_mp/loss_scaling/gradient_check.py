"""Do gradients fit their variables? Asked before anything is changed."""

from collections.abc import Sequence
from typing import Any


def check_gradients(grads: Sequence[Any], variables: Sequence[Any]) -> None:
    """Raises a ValueError unless each gradient fits its variable.

    Args:
        grads: gradients, None where there is none.
        variables: the variables, in the same order.

    Raises:
        ValueError: if their numbers or shapes differ, or all gradients are None.
    """
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
        if grad is not None and not _same_shape(grad.shape, variable.shape):
            raise ValueError(
                "Each gradient must have the shape of its variable. Received: a "
                f"gradient of shape {tuple(grad.shape)} for variable "
                f"{getattr(variable, 'path', variable.name)} of shape "
                f"{tuple(variable.shape)}."
            )


def _same_shape(grad: Any, variable: Any) -> bool:
    """Compares static shapes; a dimension not known yet fits any."""
    if getattr(grad, "rank", 0) is None:
        return True
    grad, variable = tuple(grad), tuple(variable)
    return len(grad) == len(variable) and all(
        a is None or a == b for a, b in zip(grad, variable, strict=True)
    )
