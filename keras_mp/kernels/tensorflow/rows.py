"""What `kernels/rows.py` takes from TensorFlow's XLA, and its loss with derivatives."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from keras import ops

from keras_mp.backends.tensorflow import private
from keras_mp.kernels import rows
from keras_mp.kernels.logits import Product
from keras_mp.kernels.targets import is_floating
from keras_mp.kernels.tensorflow import one_pass
from keras_mp.kernels.tensorflow.products import half_product
from keras_mp.types import Tensor

# The losses (rows,) of logits and targets, not in chunks.
Whole = Callable[[Any, Any], Any]


def losses(
    head: Product, number: int, targets: Tensor, whole: Whole
) -> tuple[Any, Any]:
    """The losses (rows,), and the classes of the largest logits if metrics read them.

    Args:
        head: the logits (rows, classes).
        number: the number of chunks.
        targets: integer labels (rows,), or probabilities (rows, classes).
        whole: computes them otherwise, for derivatives of the gradient.
    """
    loss = rows.Loss(_Tools(), head, number)
    operands = head.inputs, head.kernel, targets, *head.others
    floating = [i for i, x in enumerate(operands) if is_floating(x)]

    def put(values: Sequence) -> list[Any]:
        """All operands, these in the place of those that are differentiated by."""
        found = list(operands)
        for i, value in zip(floating, values, strict=True):
            found[i] = value
        return found

    def slowly(gradient: Tensor, *values: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(values)
            inputs, kernel, targets, *others = put(values)
            product = half_product(inputs, kernel, head.operands)
            losses = whole(head.follow(product, others), targets)
        return tape.gradient(losses, values, gradient)

    @tf.custom_gradient
    def run(*values: Any) -> tuple[Any, Callable]:
        (losses, largest), (slopes, scale) = loss.forward(put(values), True)
        # Where gradients are differentiated, TensorFlow asks for theirs, too.
        kept = tf.stop_gradient(slopes), tf.stop_gradient(scale)

        @tf.custom_gradient
        def once(gradient: Tensor, *values: Any) -> tuple[Any, Callable]:
            found = loss.backward(put(values), kept, gradient)

            def twice(*upstream: Any) -> Any:
                operands = gradient, *values
                with tf.GradientTape() as tape:
                    tape.watch(operands)
                    again = slowly(*operands)
                return tape.gradient(again, operands, upstream)

            return [found[i] for i in floating], twice

        def derivative(gradient: Tensor, *_: Any) -> Any:
            return once(gradient, *values)

        return (losses if largest is None else (losses, largest)), derivative

    results = run(*(operands[i] for i in floating))
    return tuple(results) if head.operands.classes else (results, None)


class _Tools:
    in_turn = False

    def multiply(self, a: Tensor, b: Tensor, dtype: str) -> Any:
        return private.dot(a, b, len(a.shape) - 1, 0, dtype)

    def multiply_transposed(self, a: Tensor, b: Tensor, dtype: str) -> Any:
        return private.dot(a, b, len(a.shape) - 1, 1, dtype)

    def contract(self, a: Tensor, b: Tensor, dtype: str) -> Any:
        a, b = (ops.reshape(x, (-1, x.shape[-1])) for x in (a, b))
        return private.dot(a, b, 0, 0, dtype)

    def barrier(self, structure: Any) -> Any:
        flat = tf.nest.flatten(structure)
        tensors = iter(private.barrier(*(x for x in flat if x is not None)))
        after = [None if x is None else next(tensors) for x in flat]
        return tf.nest.pack_sequence_as(structure, after)

    def empty(self, shape: Sequence[Any], dtype: str) -> Any:
        # XLA has memory without values on GPUs, of a known size.
        if private.is_for_gpu() and all(isinstance(n, int) for n in shape):
            return private.empty(shape, dtype)
        return tf.zeros(shape, dtype)

    def log_sums(self, logits: Tensor, classes: bool) -> tuple[Any, Any]:
        return one_pass.log_sums(logits, classes)

    def own(self, logits: Tensor, labels: Tensor) -> Any:
        inside = tf.clip_by_value(labels, 0, logits.shape[-1] - 1)
        return tf.gather(logits, inside, batch_dims=len(labels.shape))

    def pull(self, function: Callable, x: Tensor) -> tuple[Any, Callable]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        if y is x:
            return y, lambda gradient: gradient
        return y, lambda gradient: tape.gradient(y, x, gradient)
