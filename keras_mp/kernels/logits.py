"""Tells the loss how the logits that it reads were made, where a compiler traces.

A function that is traced by itself (`jax.checkpoint`, `jit`, `tf.function`) returns
another tensor than the one known inside it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_mp.backends.interface import Wrapper, around
from keras_mp.backends.known import known_tensors
from keras_mp.repairs.logits import known, note, noted
from keras_mp.repairs.products import HalfOperands, in_scope
from keras_mp.types import Tensor


class Product(NamedTuple):
    """A product of (..., k) and (k, classes), and the steps that followed it.

    Attributes:
        inputs: (..., k); on TensorFlow (rows, k).
        kernel: (k, classes).
        operands: how it is computed.
        others: further tensors that the steps take, which broadcast to the logits.
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

    def follow(self, product: Any, others: Sequence[Any]) -> Any:
        """The logits, from their product."""
        return functools.reduce(lambda x, step: step(x, others), self.steps, product)

    def follow_part(self, product: Any, others: Sequence, start: int, stop: int) -> Any:
        """The logits of the classes from `start` to `stop`, from their product."""
        parts = [
            x[..., start:stop] if len(x.shape) and x.shape[-1] > 1 else x
            for x in others
        ]
        return self.follow(product, parts)


class Probabilities(NamedTuple):
    """The softmax of a head's logits."""

    logits: Any


_PRODUCT = object()  # Stands for the product itself, which nothing may keep alive.
classes = known_tensors("classes")  # The classes of the largest logits.


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


def kernels(
    others: dict[str, Wrapper], of_one_program: Callable[[Tensor, Tensor], bool]
) -> dict[str, Wrapper]:
    """Wrappers of what heads, losses and metrics do to logits.

    Heads add a bias or cap logits (divide, tanh, multiply); losses mask ignored labels.

    Args:
        others: they go around these by the same name.
        of_one_program: whether two tensors may be read in the same place.
    """
    names = (*others, "divide", "tanh", "where")
    of_metrics = functools.partial(_argmax, of_one_program)
    return {**around(others, names, _followed), "argmax": of_metrics}


def softmax(original: Callable) -> Callable:
    """Wraps the softmax: the loss is computed from its logits."""

    @functools.wraps(original)
    def noting(x: Tensor, axis: int = -1) -> Any:
        probabilities = original(x, axis)
        if axis == -1 and (in_scope() or known(x)):
            note(probabilities, Probabilities(x))
        return probabilities

    return noting


def _argmax(of_one_program: Callable, original: Callable) -> Callable:
    @functools.wraps(original)
    def argmax(x: Tensor, axis: int | None = None, keepdims: bool = False) -> Any:
        found = classes.get(x) if classes.facts else None
        is_known = found is not None and axis in (-1, len(x.shape) - 1)
        if is_known and not keepdims and of_one_program(x, found):
            return found
        return original(x, axis=axis, keepdims=keepdims)

    return argmax


def _followed(original: Callable) -> Callable:
    @functools.wraps(original)
    def operation(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if kwargs or not noted.facts:
            return result
        products = [x for x in args if isinstance(known(x), Product)]
        # Sizes that TensorFlow does not know are None in both.
        if len(products) == 1 and tuple(products[0].shape) == tuple(result.shape):
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
            others.append(ops.convert_to_tensor(x))
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
