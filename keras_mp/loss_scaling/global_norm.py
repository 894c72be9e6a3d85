"""Global-norm clipping reads every gradient; that it is finite can be seen from it."""

from collections.abc import Sequence
from typing import Any

from keras import ops


def clips_by_global_norm(optimizer: Any) -> bool:
    """Whether the next step of this optimizer takes the norm of the gradients given.

    One that accumulates takes the norm of their sum.
    """
    return bool(
        getattr(optimizer, "global_clipnorm", None)
        and not optimizer.clipnorm
        and not optimizer.gradient_accumulation_steps
    )


def squares(grads: Sequence[Any]) -> tuple[list[Any], Any]:
    """Returns the sum of squares of each gradient, None for None, and their sum.

    As Keras' `clip_by_global_norm` computes them, operation for operation: XLA makes
    one of what is computed twice. Beyond 1.8e19 squares overflow in float32, and Keras'
    norm and all that it writes with them: such a step has to be skipped, too.

    Args:
        grads: float32 tensors, None where there is none.
    """
    sums = [None if g is None else ops.sum(ops.square(g)) for g in grads]
    return sums, ops.sum(ops.stack([s for s in sums if s is not None]))
