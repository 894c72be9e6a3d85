"""Tells the loss how the logits that it reads were made.

A function that is traced by itself (`jax.checkpoint`, `jit`) returns another tensor
than the one known inside it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
from jax import lax

from keras_mp.backends.interface import Wrapper, around
from keras_mp.backends.known import IN_USE, Known
from keras_mp.kernels.jax.private import are_of_one_trace
from keras_mp.repairs.jax.logits import known, note, noted
from keras_mp.repairs.products import HalfOperands
from keras_mp.types import Tensor


class Product(NamedTuple):
    """A product of (..., k) and (k, classes), and the steps that followed it.

    Attributes:
        inputs: (..., k).
        kernel: (k, classes).
        operands: how it is computed.
        others: further tensors that the steps take, which broadcast to the product.
        steps: elementwise functions of the result so far and `others`.
        added: how many of the others are added to the product before anything else.
        returned: whether the head returned the result of the last step.
    """

    inputs: Any
    kernel: Any
    operands: HalfOperands
    others: tuple[Any, ...] = ()
    steps: tuple[Callable[[Any, Sequence[Any]], Any], ...] = ()
    added: int = 0
    returned: bool = False

    def follow(self, product: Any, others: Sequence[Any], start: int, stop: int) -> Any:
        """The logits of the classes from `start` to `stop`, from their product."""
        parts = [
            lax.slice_in_dim(x, start, stop, axis=x.ndim - 1)
            if x.ndim and x.shape[-1] > 1
            else x
            for x in others
        ]
        return functools.reduce(lambda x, step: step(x, parts), self.steps, product)


class Probabilities(NamedTuple):
    """The softmax of a head's logits."""

    logits: Any


_PRODUCT = object()  # Stands for the product itself, which nothing may keep alive.
_classes: Known[Any] = Known()  # The classes of the largest logits.
IN_USE.append(_classes.facts)


def note_classes(losses: Any, output: Tensor, classes: Any) -> Any:
    """Remembers the class of an output's largest element for metrics that read it.

    Args:
        losses: any tensor that the step goes on with.
        output: (..., classes), what a head or a softmax after it returned.
        classes: the class of its largest element, (...,).

    Returns:
        `losses`, to go on with.
    """
    _classes.note(output, classes)
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
    _classes.note(output, classes)
    return losses, tangents[0]


def of_heads(original: Callable) -> Callable:
    """Wraps the call of a head, which returns logits or their softmax."""

    @functools.wraps(original)
    def call(*args: Any) -> Any:
        outputs = original(*args)
        for output in keras.tree.flatten(outputs):
            fact = known(output)
            logits = fact.logits if isinstance(fact, Probabilities) else output
            product = known(logits)
            if isinstance(product, Product):
                note(logits, product._replace(returned=True))
        return outputs

    return call


def kernels(others: dict[str, Wrapper]) -> dict[str, Wrapper]:
    """Wrappers of what heads and losses do to logits, around others by the same name.

    Heads add a bias or cap logits (divide, tanh, multiply); losses mask ignored labels.
    """
    names = (*others, "divide", "tanh", "where")
    return {**around(others, names, _followed), "argmax": _argmax}


def _argmax(original: Callable) -> Callable:
    @functools.wraps(original)
    def argmax(x: Tensor, axis: int | None = None, keepdims: bool = False) -> Any:
        classes = _classes.get(x) if _classes.facts else None
        is_known = classes is not None and axis in (-1, x.ndim - 1) and not keepdims
        if is_known and are_of_one_trace(x, classes):
            return classes
        return original(x, axis=axis, keepdims=keepdims)

    return argmax


def _followed(original: Callable) -> Callable:
    @functools.wraps(original)
    def operation(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if kwargs or not noted.facts:
            return result
        products = [x for x in args if isinstance(known(x), Product)]
        if len(products) == 1 and products[0].shape == result.shape:
            _note_step(original, args, products[0], result)
        return result

    return operation


def _note_step(original: Callable, args: Sequence, before: Any, result: Any) -> None:
    fact: Any = known(before)
    others = list(fact.others)
    # For each argument: its value, or else its place among the others.
    places: list[tuple[Any, int | None]] = []
    for x in args:
        if x is before:
            places.append((_PRODUCT, None))
        elif hasattr(x, "shape"):
            places.append((None, len(others)))
            others.append(jnp.asarray(getattr(x, "value", x)))
        else:
            places.append((x, None))

    def step(product: Any, others: Sequence[Any]) -> Any:
        arguments = (x if i is None else others[i] for x, i in places)
        return original(*(product if x is _PRODUCT else x for x in arguments))

    steps = (*fact.steps, step)
    only_adds = fact.added == len(fact.steps) and original.__name__ == "add"
    added = len(others) if only_adds else fact.added
    note(
        result,
        fact._replace(others=tuple(others), steps=steps, added=added, returned=False),
    )
