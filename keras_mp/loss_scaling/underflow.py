"""The share of gradients that underflow in float16, if somebody asks for it."""

from collections.abc import Collection, Sequence
from typing import Any

from keras import ops

from keras_mp.types import Gradients, Tensor, Variables

SMALLEST_NORMAL = 2.0**-14


class UnderflowWatch:
    """Looks at the scaled gradients of one optimizer's steps.

    Attributes:
        watched: the ids of the variables whose gradients are looked at.
    """

    def __init__(self) -> None:
        self.watched: Collection[int] = ()
        self._share: Any = None

    def watch(self, variables: Variables) -> None:
        """Watches the gradients by these variables, from this step (or trace) on."""
        self.watched, self._share = {id(v) for v in variables}, None

    def look(self, grads: Gradients, variables: Variables) -> None:
        """Looks at the scaled gradients of a step."""
        pairs = zip(grads, variables, strict=True)
        seen = [g for g, v in pairs if g is not None and id(v) in self.watched]
        if seen:
            self._share = subnormal_share(seen)

    def take(self) -> Any:
        """The share in the last step, a float32 scalar; None if none was seen."""
        share, self._share = self._share, None
        return share


def subnormal_share(grads: Sequence[Tensor]) -> Any:
    """The share of the nonzero elements that are below float16's normal numbers.

    They lose bits, and below 2^-25 all of them. An element that became 0 cannot be told
    from one that was 0.
    """
    below = present = 0.0
    for grad in grads:
        # A sparse TensorFlow gradient counts only the values that it holds.
        values = grad.values if hasattr(grad, "dense_shape") else grad
        size = ops.abs(ops.cast(values, "float32"))
        nonzero = ops.sum(ops.cast(size > 0, "float32"))
        below += nonzero - ops.sum(ops.cast(size >= SMALLEST_NORMAL, "float32"))
        present += nonzero
    return below / ops.maximum(present, 1.0)
