"""Scaled dot-product attention in half precision, as the device wants it.

The kernel is chosen when the program is lowered, not by the devices of the process that
traces it.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import keras
from jax import lax
from keras import ops

from keras_mp.backends.interface import HALF
from keras_mp.backends.jax import compilation
from keras_mp.types import Tensor

# What platforms compute it with, of a call's (query, key, value, bias, mask).
Fused = Callable[..., dict[str, Callable]]


def _none(*tensors: Any) -> dict[str, Callable]:
    return {}


def in_half_precision(original: Callable, fused: Fused = _none) -> Callable:
    """Wraps Keras' `dot_product_attention`: we compute its calls in half precision.

    Args:
        fused: the kernels that devices have for the tensors of a call.
    """

    @functools.wraps(original)
    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        tensors = [ops.convert_to_tensor(x) for x in (query, key, value)]
        dtype = keras.backend.result_type(*(x.dtype for x in tensors))
        is_ours = dtype in HALF and all(x.ndim == 4 for x in tensors)
        asked_for = options.pop("flash_attention", None)
        soft_cap = options.pop("attn_logits_soft_cap", None)
        if not is_ours or asked_for or soft_cap is not None:
            return original(
                query,
                key,
                value,
                flash_attention=asked_for,
                attn_logits_soft_cap=soft_cap,
                **options,
            )
        query, key, value = (x.astype(dtype) for x in tensors)
        fuses = fused if asked_for is None else _none
        return _in_half(query, key, value, fused=fuses, **options)

    return attention


def _in_half(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    fused: Fused,
    bias: Tensor = None,
    mask: Tensor = None,
    scale: Tensor = None,
    is_causal: bool = False,
) -> Any:
    if scale is None:
        scale = 1 / math.sqrt(key.shape[-1])
    elif not isinstance(scale, (int, float)):  # It may be learned.
        scale = ops.cast(scale, "float32")
        query, scale = (query.astype("float32") * scale).astype(query.dtype), 1.0
    return _attention(
        query,
        key,
        value,
        None if bias is None else _of_rank_4(bias, query).astype(query.dtype),
        None if mask is None else _of_rank_4(mask, query).astype("bool"),
        float(scale),
        is_causal,
        fused,
    )


def _of_rank_4(x: Tensor, query: Tensor) -> Any:
    """A mask or bias as (batch, heads, T, S), where sizes may be 1."""
    x = ops.convert_to_tensor(x)
    if x.ndim == 3 and x.shape[1] == query.shape[2]:
        return x[:, :, None]
    if x.ndim == 3:
        return x[:, None]
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


# Compiled for a TPU v5e, a ViT takes 4 % longer if this is a function of its own there.
@functools.partial(compilation.compiled, static=(5, 6, 7))
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    mask: Tensor,
    scale: float,
    is_causal: bool,
    fused: Fused,
) -> Any:
    options: dict[str, Any] = {"scale": scale, "is_causal": is_causal}
    plain = functools.partial(
        jax.nn.dot_product_attention, implementation="xla", **options
    )
    in_float32 = functools.partial(_in_float32, plain)
    # CPUs have no such products in half precision, and TPUs none in float16.
    branches: dict[str, Callable] = {"cpu": in_float32, "default": plain}
    if query.dtype == "float16":
        branches["tpu"] = in_float32
    for platform, attend in fused(query, key, value, bias, mask).items():
        branches[platform] = functools.partial(attend, **options)
    return lax.platform_dependent(query, key, value, bias, mask, **branches)


def _in_float32(plain: Callable, *tensors: Any) -> Any:
    query, key, value, bias, mask = tensors
    wide = (x if x is None else x.astype("float32") for x in (query, key, value, bias))
    return plain(*wide, mask).astype(query.dtype)
