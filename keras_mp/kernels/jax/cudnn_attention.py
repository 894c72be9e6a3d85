"""Attention by cuDNN's fused kernel, which writes no logits, if it applies.

Source: Dao et al. 2022, "FlashAttention: Fast and Memory-Efficient Exact Attention".
"""

from typing import Any

import jax
import jax.numpy as jnp

from keras_mp.kernels.jax.private import cudnn_assumed
from keras_mp.types import Tensor

# The size of a head is a multiple of 8, up to the first; before Hopper, the second.
LARGEST, LARGEST_BEFORE_HOPPER = 256, 128
AMPERE, HOPPER = (8, 0), (9, 0)


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Can the kernel compute it, on the GPU of this process?

    Without a GPU here, an Ampere GPU or a later one is assumed.
    """
    try:
        capability = jax.devices("cuda")[0].compute_capability
        found = tuple(map(int, capability.split(".")))
    except RuntimeError:
        found = AMPERE
    size = query.shape[-1]
    return (
        found >= AMPERE
        and size % 8 == 0
        and size <= (LARGEST if found >= HOPPER else LARGEST_BEFORE_HOPPER)
        and value.shape[-1] == size
        and query.shape[2] % key.shape[2] == 0
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    mask: Tensor,
    **options: Any,
) -> Any:
    """Takes and returns what `jax.nn.dot_product_attention` does.

    The kernel takes even lengths: odd ones are padded, and the result is cut. It does
    not broadcast either length of a bias or mask.
    """
    length, keys = query.shape[1], key.shape[1]
    odd, odd_keys = length % 2, keys % 2
    if odd_keys and bias is None and mask is None:
        of_each = query.shape[:1]
        options["query_seq_lengths"] = jnp.full(of_each, length, "int32")
        options["key_value_seq_lengths"] = jnp.full(of_each, keys, "int32")
    elif odd_keys and mask is None:
        mask = jnp.ones((1, 1, 1, keys), "bool")  # The padded key is masked.
    whole = [
        x if x is None else jnp.broadcast_to(x, (*x.shape[:2], length, keys))
        for x in (bias, mask)
    ]
    with cudnn_assumed():
        result = jax.nn.dot_product_attention(
            _padded(query, (0, odd, 0, 0)),
            *(_padded(x, (0, odd_keys, 0, 0)) for x in (key, value)),
            *(_padded(x, (0, 0, odd, odd_keys)) for x in whole),
            implementation="cudnn",
            **options,
        )
    return result[:, :length]


def _padded(x: Tensor, sizes: tuple[int, ...]) -> Any:
    """Pads the end of each axis with zeros, or False."""
    if x is None or not any(sizes):
        return x
    return jnp.pad(x, [(0, size) for size in sizes])
