"""The class of the largest logit, which the loss finds, for metrics that read it."""

from collections.abc import Sequence
from typing import Any

import jax

from keras_mp.kernels import logits
from keras_mp.types import Tensor


def note(losses: Any, output: Tensor, classes: Any) -> Any:
    """Remembers the class of an output's largest element for metrics that read it.

    Args:
        losses: any tensor that the step goes on with.
        output: (..., classes), what a head or a softmax after it returned.
        classes: the class of its largest element, (...,).

    Returns:
        `losses`, to go on with.
    """
    logits.classes.note(output, classes)
    return _noting(losses, output, classes)


# Keras differentiates the loss with `jax.value_and_grad` and computes metrics outside,
# where the model's output is another tracer. `_note_outside` gets that: JAX calls it
# with the values that the tracers of the differentiation stand for.
@jax.custom_jvp
def _noting(losses: Any, output: Tensor, classes: Any) -> Any:
    return losses


@_noting.defjvp
def _note_outside(primals: Sequence, tangents: Sequence) -> tuple[Any, Any]:
    losses, output, classes = primals
    logits.classes.note(output, classes)
    return losses, tangents[0]
