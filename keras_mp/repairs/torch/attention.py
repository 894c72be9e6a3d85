"""Attention in half precision, with the right gradient for rows that see nothing.

Keras copies its inputs into the order in memory that some kernel of an older torch
wanted. Today's kernels take any order, with the same results.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from keras import ops

from keras_mp.backends.leaves import is_half_tensor
from keras_mp.types import Tensor

# Added to a masked logit, this is as good as -inf. If a whole row is masked, -inf gives
# nan, and a number near bfloat16's largest, as in Keras, makes torch's kernels return a
# gradient that is too large by the number of keys.
_MASKED = -45850.0


def attention_as_it_is(original: Callable) -> Callable:
    """Wraps `dot_product_attention`, except with the user's flags or a soft cap."""

    @functools.wraps(original)
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor = None,
        mask: Tensor = None,
        scale: Tensor = None,
        is_causal: bool = False,
        **rest: Any,
    ) -> Any:
        tensors = [ops.convert_to_tensor(x) for x in (query, key, value)]
        alike = len({(x.dtype, x.ndim) for x in tensors}) == 1
        half = is_half_tensor(tensors[0]) and tensors[0].ndim == 4
        asked = any(x is not None for x in rest.values())
        asked = asked or (bias is not None and mask is not None)
        heads, of_keys = (x.shape[2] for x in tensors[:2]) if half else (0, 0)
        grouped = heads != of_keys
        if asked or not (alike and half) or (grouped and heads % of_keys):
            return original(
                query, key, value, bias, mask, scale, is_causal=is_causal, **rest
            )
        # Swaps positions and heads.
        query, key, value = (x.transpose(1, 2) for x in tensors)
        if mask is not None:
            bias = _added_for(mask, query, key, is_causal)
        elif bias is not None:
            bias = ops.convert_to_tensor(bias).to(query.dtype)
            # torch's kernels need all axes.
            bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
        if grouped and bias is not None:
            # torch's GPU kernels that take a bias do not take groups.
            key, value = (_for_each_head(x, heads) for x in (key, value))
            grouped = False
        result = torch.nn.functional.scaled_dot_product_attention(
            *(query, key, value, bias),
            is_causal=is_causal and mask is None,
            scale=scale,
            enable_gqa=grouped,
        )
        return result.transpose(1, 2)

    return attention


def _for_each_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(batch, heads of the keys, ...) to (batch, heads, ...); for one head a view."""
    if x.shape[1] == 1:
        return x.expand(-1, heads, -1, -1)
    return x.repeat_interleave(heads // x.shape[1], 1)


def _added_for(
    mask: Tensor, query: Tensor, key: Tensor, is_causal: bool
) -> torch.Tensor:
    """What is added to the logits for a mask."""
    mask = ops.convert_to_tensor(mask, "bool")
    if is_causal:
        shape = query.shape[2], key.shape[2]
        mask = mask & torch.ones(shape, dtype=torch.bool, device=mask.device).tril()
    none = torch.zeros((), dtype=query.dtype, device=mask.device)
    return torch.where(mask, none, _MASKED)
