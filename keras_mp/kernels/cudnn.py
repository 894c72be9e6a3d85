"""What cuDNN's fused attention takes, and how other tensors are made to fit.

It writes no logits. Source: Dao et al. 2022, "FlashAttention: Fast and Memory-Efficient
Exact Attention".
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from keras import ops

from keras_mp.types import Tensor

# The size of a head is a multiple of 8, up to the first; before Hopper, the second.
LARGEST, LARGEST_BEFORE_HOPPER = 256, 128
AMPERE, HOPPER = (8, 0), (9, 0)


def takes(
    query: Tensor, key: Tensor, value: Tensor, capability: tuple[int, ...]
) -> bool:
    """Can the kernel compute it, on a GPU of this compute capability?

    Args:
        query, key, value: (batch, length, heads, size).
        capability: such as (9, 0).
    """
    size = query.shape[-1]
    return (
        capability >= AMPERE
        and size % 8 == 0
        and size <= (LARGEST if capability >= HOPPER else LARGEST_BEFORE_HOPPER)
        and value.shape[-1] == size
        and query.shape[2] % key.shape[2] == 0
    )


def fitted(
    attend: Callable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    mask: Tensor,
    is_causal: bool,
) -> Any:
    """Calls the kernel with what it takes, and cuts its result.

    It takes even lengths: odd ones are padded. It does not broadcast either length of a
    bias or mask, and each row of a mask has to see a key.

    Args:
        attend: takes these five tensors, and (length, keys) before they were padded;
            None in its place if no key was padded, or if a mask leaves it out.
        query, key, value: (batch, length, heads, size).
        bias, mask: (batch, heads, length, keys), where sizes may be 1; or None.
        is_causal: whether the kernel leaves out later keys.
    """
    if mask is not None:
        query, bias, mask = _sighted(query, key, bias, mask, is_causal)
    length, keys = query.shape[1], key.shape[1]
    odd, odd_keys = length % 2, keys % 2
    lengths = (length, keys) if odd_keys and bias is None and mask is None else None
    if odd_keys and bias is not None and mask is None:
        mask = ops.ones((1, 1, 1, keys), "bool")  # The padded key is masked.
    whole = [
        x if x is None else ops.broadcast_to(x, (*x.shape[:2], length, keys))
        for x in (bias, mask)
    ]
    result = attend(
        _padded(query, (0, odd, 0, 0)),
        *(_padded(x, (0, odd_keys, 0, 0)) for x in (key, value)),
        *(_padded(x, (0, 0, odd, odd_keys)) for x in whole),
        lengths,
    )
    return result[:, :length] if odd else result


def _sighted(
    query: Tensor, key: Tensor, bias: Tensor, mask: Tensor, is_causal: bool
) -> tuple[Any, Any, Any]:
    """Lets rows that see no key, as those of padding, see all keys alike, as in Keras.

    The kernel adds a large negative number to what is masked. If that is a whole row,
    the sum of its exponentials is lost in bfloat16, and its gradient is too large by
    the number of keys.
    """
    seen = mask
    if is_causal:
        earlier = np.tri(query.shape[1], key.shape[1], dtype=bool)
        seen = ops.logical_and(mask, earlier)
    sees = ops.any(seen, axis=-1, keepdims=True)
    query = ops.where(ops.swapaxes(sees, 1, 2), query, ops.zeros_like(query))
    if bias is not None:
        bias = ops.where(sees, bias, ops.zeros_like(bias))
    return query, bias, ops.logical_or(mask, ops.logical_not(sees))


def _padded(x: Tensor, sizes: tuple[int, ...]) -> Any:
    """Pads the end of each axis with zeros, or False."""
    if x is None or not any(sizes):
        return x
    return ops.pad(x, [(0, size) for size in sizes])
