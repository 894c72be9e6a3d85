"""How a large head and its cross-entropy are differentiated: in which chunks.

The gradient of the logits is never whole in float32, and neither are the logits. This
is known as fused linear cross-entropy (Hsu et al. 2024, Liger Kernel; Wijmans et al.
2024, Cut Your Losses); here XLA computes it.
"""

import functools
import math
from typing import Any

import keras
from jax import lax

from keras_mp.kernels import products
from keras_mp.kernels.jax import chunks, rows
from keras_mp.kernels.logits import Product
from keras_mp.kernels.rows import fits
from keras_mp.types import Tensor

# Of a chunk. With half as many a decoder's step, compiled for an H100, has 24 kernels
# more and takes 2 % longer, in 5 % less memory.
ROWS = 1024


def number_of_chunks(rows: int, classes: int, logits: str) -> int:
    """As in `products`, for chunks of at least `ROWS` rows."""
    return products.number_of_chunks(rows, classes, logits, ROWS)


def number_for(head: Product) -> int:
    """The number of chunks; 0 if the loss reads all logits at once."""
    how = head.operands
    if how.logits == "in chunks" and not fits(head):
        return 0
    distribution: Any = keras.distribution.distribution()
    devices = math.prod(distribution.device_mesh.shape) if distribution else 1
    count = math.prod(head.inputs.shape[:-1]) // devices
    return number_of_chunks(count, head.kernel.shape[-1], how.logits)


def losses(head: Product, targets: Tensor, number: int) -> Any:
    """The losses (...,), and the class of the largest logit (...,) if metrics read it.

    There is no forward derivative (`jax.jvp`).

    Args:
        head: the logits (..., classes).
        targets: integer labels (...,), or probabilities (..., classes).
        number: the number of chunks.
    """
    operands = head.inputs, head.kernel, list(head.others), targets
    if head.operands.logits == "recomputed":
        return chunks.losses(head, number, *operands)
    # On TPUs XLA computes the gradient of the logits within the products that read it,
    # and never writes it: a decoder's step takes 18.1 ms in one chunk, 19.7 ms in four.
    as_a_whole = functools.partial(chunks.losses, head, 1)
    in_rows = functools.partial(rows.losses, head, number)
    return lax.platform_dependent(*operands, tpu=as_a_whole, default=in_rows)
