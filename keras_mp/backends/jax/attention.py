"""Scaled dot-product attention in half precision, as the device wants it.

Which kernel computes it is decided where the program is lowered, not by the devices of
the process that traces it. On NVIDIA's GPUs it is cuDNN's fused one (Dao et al. 2022,
"FlashAttention"), wherever it can be: no array of (batch, heads, T, S) is written.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax import lax
from keras import ops

from keras_mp.backends.jax.private import cudnn_assumed

HALF = ("float16", "bfloat16")
# cuDNN's kernel: multiples of 8 up to this, and before Hopper up to this.
LARGEST_HEAD, LARGEST_HEAD_BEFORE_HOPPER = 256, 128
AMPERE, HOPPER = (8, 0), (9, 0)


def chosen_by_device(original: Callable) -> Callable:
    """Wraps Keras' `dot_product_attention`: its calls in half precision are ours."""

    @functools.wraps(original)
    def attention(
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        scale: Any = None,
        is_causal: bool = False,
        flash_attention: bool | None = None,
        attn_logits_soft_cap: float | None = None,
    ) -> Any:
        tensors = [ops.convert_to_tensor(x) for x in (query, key, value)]
        dtype = keras.backend.result_type(*(x.dtype for x in tensors))
        is_ours = dtype in HALF and all(x.ndim == 4 for x in tensors)
        if not is_ours or flash_attention or attn_logits_soft_cap is not None:
            return original(
                query,
                key,
                value,
                bias=bias,
                mask=mask,
                scale=scale,
                is_causal=is_causal,
                flash_attention=flash_attention,
                attn_logits_soft_cap=attn_logits_soft_cap,
            )
        query, key, value = (x.astype(dtype) for x in tensors)
        if scale is None:
            scale = 1 / math.sqrt(key.shape[-1])
        elif not isinstance(scale, (int, float)):  # It may be learned.
            scale = ops.cast(scale, "float32")
            query, scale = (query.astype("float32") * scale).astype(dtype), 1.0
        fused = flash_attention is None and cudnn_takes(query, key, value)
        return _attention(
            query,
            key,
            value,
            None if bias is None else _of_rank_4(bias, query).astype(dtype),
            None if mask is None else _of_rank_4(mask, query).astype("bool"),
            scale=float(scale),
            is_causal=is_causal,
            fused=fused,
        )

    return attention


def cudnn_takes(query: Any, key: Any, value: Any) -> bool:
    """Does the kernel take such tensors, on the GPU of this process or any that has it?

    Without a GPU here, one from Ampere on is assumed.
    """
    try:
        capability = jax.devices("cuda")[0].compute_capability
        found = tuple(map(int, capability.split(".")))
    except RuntimeError:
        found = AMPERE
    largest = LARGEST_HEAD if found >= HOPPER else LARGEST_HEAD_BEFORE_HOPPER
    size = query.shape[-1]
    return (
        found >= AMPERE
        and size % 8 == 0
        and size <= largest
        and value.shape[-1] == size
        and query.shape[-2] % key.shape[-2] == 0
    )


def _of_rank_4(x: Any, query: Any) -> Any:
    """A mask or bias as (batch, heads, T, S), where sizes may be 1."""
    x = ops.convert_to_tensor(x)
    if x.ndim == 3 and x.shape[1] == query.shape[2]:
        return x[:, :, None]
    if x.ndim == 3:
        return x[:, None]
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


# Traced once for all layers of the same sizes.
@functools.partial(jax.jit, static_argnames=("scale", "is_causal", "fused"))
def _attention(*tensors: Any, scale: float, is_causal: bool, fused: bool) -> Any:
    plain = functools.partial(
        jax.nn.dot_product_attention,
        scale=scale,
        is_causal=is_causal,
        implementation="xla",
    )
    branches = {"cpu": functools.partial(_in_float32, plain), "default": plain}
    if fused:
        branches["cuda"] = functools.partial(
            _by_cudnn, scale=scale, is_causal=is_causal
        )
    return lax.platform_dependent(*tensors, **branches)


def _in_float32(plain: Callable, *tensors: Any) -> Any:
    """In float32: JAX has no kernels in half precision for CPUs."""
    query, key, value, bias, mask = tensors
    wide = (x if x is None else x.astype("float32") for x in (query, key, value, bias))
    return plain(*wide, mask).astype(query.dtype)


def _by_cudnn(
    query: Any, key: Any, value: Any, bias: Any, mask: Any, **options: Any
) -> Any:
    """By cuDNN's kernel, which takes even lengths: others are padded, and cut."""
    length, keys = query.shape[1], key.shape[1]
    odd, odd_keys = length % 2, keys % 2
    if odd_keys and (bias is not None or mask is not None):
        # The padded key is masked, whatever the bias.
        mask = jnp.ones((1, 1, 1, keys), "bool") if mask is None else mask
    elif odd_keys:
        of_each = query.shape[:1]
        options["query_seq_lengths"] = jnp.full(of_each, length, "int32")
        options["key_value_seq_lengths"] = jnp.full(of_each, keys, "int32")
    whole = [
        # Of these the kernel broadcasts neither length.
        x if x is None else jnp.broadcast_to(x, (*x.shape[:2], length, keys))
        for x in (bias, mask)
    ]
    with cudnn_assumed():
        result = jax.nn.dot_product_attention(
            *(_padded(x, (0, odd, 0, 0)) for x in (query,)),
            *(_padded(x, (0, odd_keys, 0, 0)) for x in (key, value)),
            *(_padded(x, (0, 0, odd, odd_keys)) for x in whole),
            implementation="cudnn",
            **options,
        )
    return result[:, :length]


def _padded(x: Any, sizes: tuple[int, ...]) -> Any:
    """With zeros, or False, after each axis."""
    if x is None or not any(sizes):
        return x
    return jnp.pad(x, [(0, size) for size in sizes])
