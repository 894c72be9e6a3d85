"""Attention by the splash kernel of a TPU, which writes no logits.

Keras tries it too. Its mask is a tracer under a trace, so it falls back; without a mask
it uses a causal one, and leaves the scale out.
"""

from typing import Any

import jax
import jax.numpy as jnp

from keras_mp.types import Tensor

# The kernel's blocks have this many rows and, in older JAX, this many columns.
BLOCK = 128
ANY_SIZE = (0, 10, 0)


def takes(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor
) -> bool:
    """Can the kernel compute it? It takes no float16, and only constant masks."""
    sizes = query.shape[-1], value.shape[-1]
    return (
        query.dtype == "bfloat16"
        and bias is None
        and mask is None
        and not any(x.shape[1] % BLOCK for x in (query, key))
        and query.shape[2] % key.shape[2] == 0
        and (
            jax.__version_info__ >= ANY_SIZE or not any(size % BLOCK for size in sizes)
        )
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *nothing: Any,
    scale: float,
    is_causal: bool,
) -> Any:
    """Takes and returns what `jax.nn.dot_product_attention` does."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    kind = splash.CausalMask if is_causal else splash.FullMask
    one = kind((query.shape[1], key.shape[1]))
    mask = splash.MultiHeadMask([one] * query.shape[2])
    kernel = splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
    query = (query.astype("float32") * scale).astype(query.dtype)
    of_each_head = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    return jnp.swapaxes(jax.vmap(kernel)(*of_each_head), 1, 2)
