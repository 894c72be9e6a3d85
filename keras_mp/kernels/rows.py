"""A large head and its cross-entropy in chunks of the rows, where XLA compiles.

A chunk has all logits of its rows, in float32, and so the slopes of their losses. These
stay, in half precision and in one place: no other pass over the logits is needed, each
product of the gradient is one, and nothing is added up or joined.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from keras import ops

from keras_mp.kernels import targets as of_targets
from keras_mp.kernels.logits import Product
from keras_mp.kernels.targets import is_floating
from keras_mp.types import Tensor

# Slopes by the logits are at most 1, and kept times this. In float16 those below 2**-32
# are then 0, and those above 2**-21 have 11 bits. The inputs are divided by it, and
# multiplied by the gradient of each row's loss.
_SCALE = 2.0**7


class Tools(Protocol):
    """What Keras' operations lack.

    Attributes:
        in_turn: whether each chunk takes every n-th row, so that each device has some
            of every chunk; otherwise it takes rows that follow each other.
    """

    in_turn: bool

    def multiply(self, a: Tensor, b: Tensor, dtype: str) -> Any:
        """The product of (..., k) and (k, n), both half precision, in a dtype."""

    def multiply_transposed(self, a: Tensor, b: Tensor, dtype: str) -> Any:
        """The same of (..., k) and (n, k)."""

    def contract(self, a: Tensor, b: Tensor, dtype: str) -> Any:
        """The product of (number, rows, k) and (number, rows, n) over all rows."""

    def barrier(self, structure: Any) -> Any:
        """The same tensors; what reads one of them comes after all of them."""

    def empty(self, shape: Sequence[Any], dtype: str) -> Any:
        """A tensor whose values do not matter."""

    def log_sums(self, logits: Tensor, classes: bool) -> tuple[Any, Any]:
        """Logarithms of the sums of exponentials; the classes of the largest logits.

        The second are None unless `classes`.
        """

    def own(self, logits: Tensor, labels: Tensor) -> Any:
        """The logits of the labels; any number for a label that is not a class."""

    def pull(self, function: Callable, x: Tensor) -> tuple[Any, Callable]:
        """The result, and the function from a gradient by it to that by x."""


class Loss:
    """The losses of a head in chunks of the rows, and their derivatives.

    Args:
        tools: those of the backend.
        head: the logits (..., classes).
        number: the number of chunks.
    """

    def __init__(self, tools: Tools, head: Product, number: int) -> None:
        self._tools, self._head, self._number = tools, head, number
        self._shape = ops.shape(head.inputs)[:-1]

    def forward(
        self, operands: Sequence, keeps_slopes: bool
    ) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """Losses (...,), the classes of the largest logits, and what is kept.

        Args:
            operands: inputs (..., width), kernel (width, classes), targets, and others.
                Targets are integer labels (...,), or probabilities (..., classes).
            keeps_slopes: whether the loss is differentiated.
        """
        inputs, kernel, targets, *others = operands
        tools, how = self._tools, self._head.operands
        half = ops.cast(kernel, how.dtype)
        parts, others = self._parts(inputs, targets, others)
        slopes, scale = None, None
        if keeps_slopes:
            rows = ops.shape(parts[0])[1], kernel.shape[-1]
            slopes = tools.empty((self._number, *rows), how.gradient)
            scale = _SCALE / self._steepness(rows, self._chunk(parts, others, 0)[1])
        found: list[tuple[Any, Any]] = []
        for index in range(self._number):
            # One after the other, or XLA keeps the logits of several.
            state = parts, others, slopes, found
            parts, others, slopes, found = tools.barrier(state)
            x, more, wanted = self._chunk(parts, others, index)
            logits, pull = self._logits(x, half, more)
            total, largest = tools.log_sums(logits, how.classes)
            own = _own(tools, logits, wanted)
            found.append((of_targets.weights(wanted) * total - own, largest))
            if keeps_slopes:
                slope = pull(of_targets.slopes(logits, total, own, wanted)) * scale
                slope = ops.cast(slope, how.gradient)[None]
                slopes = ops.slice_update(slopes, [index, 0, 0], slope)
        losses, largest = (
            None if values[0] is None else self._joined(ops.stack(values))
            for values in zip(*found, strict=True)
        )
        return (losses, largest), (slopes, scale)

    def backward(self, operands: Sequence, kept: Sequence, gradient: Tensor) -> list:
        """The gradients by the operands; None for those that have none.

        Args:
            operands: as in `forward`.
            kept: what it kept.
            gradient: that by each loss, (...,).
        """
        inputs, kernel, targets, *others = operands
        tools, how, (slopes, scale) = self._tools, self._head.operands, kept
        by_row = self._split(gradient / scale)[..., None]
        half = ops.cast(kernel, how.gradient)
        by_inputs = tools.multiply_transposed(slopes, half, "float32") * by_row
        weighted = ops.cast(self._split(inputs), "float32") * by_row
        weighted = ops.cast(weighted, how.gradient)
        # It is made beside the slopes: a large one in float32 would be the step's peak.
        # One in half precision is cast before the embedding's gradient is added to it.
        rows = math.prod(n for n in slopes.shape[:-1] if isinstance(n, int))
        is_wide = how.tied and 4 * kernel.shape[0] <= rows
        dtype = "float32" if is_wide else how.gradient
        by_kernel = tools.contract(weighted, slopes, dtype)
        by_bias = None
        if any(map(is_floating, others)):
            by_bias = ops.sum(ops.cast(slopes, "float32") * by_row, axis=(0, 1))
        return [
            ops.cast(self._joined(by_inputs), inputs.dtype),
            ops.cast(by_kernel, kernel.dtype),
            self._by_targets(operands, gradient) if is_floating(targets) else None,
            *(_of_bias(by_bias, x) if is_floating(x) else None for x in others),
        ]

    def _by_targets(self, operands: Sequence, gradient: Tensor) -> Any:
        """The gradient by them, hardly ever asked for: from logits made again."""
        inputs, kernel, targets, *others = operands
        half = ops.cast(kernel, self._head.operands.dtype)
        parts, others = self._parts(inputs, targets, others)
        found = []
        for index in range(self._number):
            x, more, _ = self._chunk(parts, others, index)
            found.append(-ops.log_softmax(self._logits(x, half, more)[0]))
        found = self._joined(ops.stack(found)) * gradient[..., None]
        return ops.cast(found, targets.dtype)

    def _logits(self, inputs: Any, half: Any, others: Sequence) -> tuple[Any, Callable]:
        """Logits of a chunk, and their derivative by the product."""
        inputs = ops.cast(inputs, self._head.operands.dtype)
        product = self._tools.multiply(inputs, half, "float32")
        return self._tools.pull(lambda x: self._head.follow(x, others), product)

    def _steepness(self, rows: Sequence[Any], others: Sequence) -> Any:
        """The largest derivative of a logit by its product, or 1: of a temperature."""
        if self._head.added == len(self._head.steps):
            return 1.0
        zeros, ones = ops.zeros(rows), ops.ones(rows)
        _, pull = self._tools.pull(lambda x: self._head.follow(x, others), zeros)
        return ops.maximum(ops.max(ops.abs(pull(ones))), 1.0)

    def _parts(
        self, inputs: Any, targets: Tensor, others: Sequence
    ) -> tuple[tuple[Any, Any], list[Any]]:
        """Inputs and targets, (number, ...) each, and others; all rows share some."""

        def part(x: Tensor) -> Any:
            if is_of_all_rows(x):
                return ops.reshape(x, x.shape[-1:])
            return self._split(ops.broadcast_to(x, (*self._shape, x.shape[-1])))

        return (self._split(inputs), self._split(targets)), [part(x) for x in others]

    def _chunk(self, parts: Sequence, others: Sequence, index: int) -> tuple:
        x, wanted = (part[index] for part in parts)
        return x, [x if len(x.shape) < 2 else x[index] for x in others], wanted

    def _split(self, x: Tensor) -> Any:
        """The rows of (..., ...) as (number, rows, ...), filled up with zeros."""
        rest = tuple(x.shape[len(self._shape) :])
        flat = ops.reshape(x, (-1, *rest))
        missing = -ops.shape(flat)[0] % self._number
        if not (isinstance(missing, int) and missing == 0):
            zeros = ops.zeros((missing, *rest), flat.dtype)
            flat = ops.concatenate([flat, zeros])
        if self._tools.in_turn:
            return ops.swapaxes(ops.reshape(flat, (-1, self._number, *rest)), 0, 1)
        return ops.reshape(flat, (self._number, -1, *rest))

    def _joined(self, x: Tensor) -> Any:
        """The rows of (number, rows, ...) again."""
        rest = tuple(x.shape[2:])
        if self._tools.in_turn:
            x = ops.swapaxes(x, 0, 1)
        flat = ops.reshape(x, (-1, *rest))
        return ops.reshape(flat[: math.prod(self._shape)], (*self._shape, *rest))


def fits(head: Product) -> bool:
    """Do the slopes by the product, from before all other steps, suffice?

    The gradients of biases that are added to it before anything else are their sums.
    """
    biases, others = head.others[: head.added], head.others[head.added :]
    return all(map(is_of_all_rows, biases)) and not any(map(is_floating, others))


def is_of_all_rows(x: Tensor) -> bool:
    return None not in x.shape[:-1] and math.prod(x.shape[:-1]) == 1


def _own(tools: Tools, logits: Tensor, targets: Tensor) -> Any:
    """The logits of the targets (...,); any number for a label that is not a class."""
    if is_floating(targets):
        return ops.sum(targets * logits, axis=-1)
    return tools.own(logits, targets)


def _of_bias(by_bias: Any, bias: Tensor) -> Any:
    """The gradient of a bias, from that of one for each class."""
    if math.prod(bias.shape) == 1:
        by_bias = ops.sum(by_bias)
    return ops.cast(ops.reshape(by_bias, bias.shape), bias.dtype)
