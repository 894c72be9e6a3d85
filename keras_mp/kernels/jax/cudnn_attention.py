"""Attention by cuDNN's fused kernel, if it applies."""

from typing import Any

import jax
import jax.numpy as jnp

from keras_mp.kernels import cudnn
from keras_mp.kernels.jax.private import cudnn_assumed
from keras_mp.types import Tensor


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Can the kernel compute it, on the GPU of this process?

    Without a GPU here, an Ampere GPU or a later one is assumed.
    """
    try:
        capability = jax.devices("cuda")[0].compute_capability
        found = tuple(map(int, capability.split(".")))
    except RuntimeError:
        found = cudnn.AMPERE
    return cudnn.takes(query, key, value, found)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    mask: Tensor,
    is_causal: bool,
    **options: Any,
) -> Any:
    """Takes and returns what `jax.nn.dot_product_attention` does."""

    def even(*arguments: Any) -> Any:
        *tensors, lengths = arguments
        if lengths is not None:
            options["query_seq_lengths"], options["key_value_seq_lengths"] = (
                jnp.full(query.shape[:1], length, "int32") for length in lengths
            )
        with cudnn_assumed():
            return jax.nn.dot_product_attention(
                *tensors, implementation="cudnn", is_causal=is_causal, **options
            )

    return cudnn.fitted(even, query, key, value, bias, mask, is_causal)
