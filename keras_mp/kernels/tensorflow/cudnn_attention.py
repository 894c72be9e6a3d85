"""Attention by cuDNN's fused kernel, by the call of it that XLA has.

The call and its settings are those of JAX (`jax/_src/cudnn/fused_attention_stablehlo`).
"""

import functools
import json
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.backends.interface import HALF
from keras_mp.backends.tensorflow import private
from keras_mp.kernels import cudnn
from keras_mp.types import Tensor

# It compiles for an H100, and no GPU has run it yet. So it waits to be asked for.
ASKED_FOR = "KERAS_MP_CUDNN_ATTENTION"
_TYPES = {"float16": "F16", "bfloat16": "BF16"}
# Added to the logits of what is masked: JAX's numbers.
_MASKED = {"float16": -(2.0**15), "bfloat16": -(2.0**41)}
# Contracted axes and heads' axes of each product's operands: queries, keys and values
# are (batch, length, heads, size), scores (batch, heads, length, keys).
_FORWARD = {
    "bmm1_dot_dimension_numbers": ((3, 3), (2, 2)),
    "bmm2_dot_dimension_numbers": ((3, 1), (1, 2)),
}
_BACKWARD = {
    "bmm1_grad_gemm1_dot_dimension_numbers": ((2, 1), (1, 2)),
    "bmm1_grad_gemm2_dot_dimension_numbers": ((3, 1), (1, 2)),
    "bmm2_grad_gemm1_dot_dimension_numbers": ((2, 1), (1, 2)),
    "bmm2_grad_gemm2_dot_dimension_numbers": ((3, 3), (2, 2)),
}


def kernel(original: Callable) -> Callable:
    """Wraps Keras' `dot_product_attention`; what the kernel does not take stays."""

    @functools.wraps(original)
    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        if not _is_asked_for():
            return original(query, key, value, **options)
        query, key, value = (tf.convert_to_tensor(x) for x in (query, key, value))
        given = {name: x for name, x in options.items() if x is not None}
        scale = given.pop("scale", None)
        is_causal = given.pop("is_causal", False)
        bias, mask = (
            tf.convert_to_tensor(given[name]) if name in given else None
            for name in ("bias", "mask")
        )
        is_fixed = scale is None or isinstance(scale, (int, float))
        is_known = is_fixed and given.keys() <= {"bias", "mask"}
        if not (is_known and _takes(query, key, value, bias, mask)):
            return original(query, key, value, **options)
        if scale is None:
            scale = 1 / math.sqrt(query.shape[-1])
        attend = functools.partial(_attend, scale=float(scale), is_causal=is_causal)
        return cudnn.fitted(attend, query, key, value, bias, mask, is_causal)

    return attention


def _is_asked_for() -> bool:
    said = os.environ.get(ASKED_FOR, "0")
    if said not in ("0", "1"):
        raise ValueError(f"`{ASKED_FOR}` must be 0 or 1. Received: {ASKED_FOR}={said}.")
    return said == "1"


def _takes(query: Tensor, key: Tensor, value: Tensor, bias: Any, mask: Any) -> bool:
    given = [x for x in (bias, mask) if x is not None]
    return (
        query.dtype.name in HALF
        and query.dtype == key.dtype == value.dtype
        and (mask is None or mask.dtype == tf.bool)
        and private.compiled_by_xla()
        and private.is_for_gpu()
        and all(x.shape.rank == 4 for x in (query, key, value, *given))
        and all(x.shape.is_fully_defined() for x in (query, key, value, *given))
        and query.shape[2] == key.shape[2]  # Keras takes no others there.
        and cudnn.takes(query, key, value, _capability())
    )


def _capability() -> tuple[int, ...]:
    """That of the GPUs; Ampere's if TensorFlow does not say."""
    experimental = tf.config.experimental
    details = map(experimental.get_device_details, tf.config.get_visible_devices("GPU"))
    found = [d["compute_capability"] for d in details if "compute_capability" in d]
    return min(found, default=cudnn.AMPERE)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Any,
    mask: Any,
    lengths: tuple[int, int] | None,
    scale: float,
    is_causal: bool,
) -> Any:
    """The attention (batch, length, heads, size). It can be differentiated once."""
    dtype = query.dtype
    if bias is not None:
        bias = tf.cast(bias, dtype)
    if mask is not None:
        least = tf.constant(_MASKED[dtype.name], dtype)
        masked = tf.where(mask, tf.zeros_like(least), least)
        bias = masked if bias is None else bias + masked
    operands = [query, key, value] + ([] if bias is None else [bias])
    kind = "Softmax" if bias is None else "ScaleBiasSoftmax"
    masks = "_".join(["PADDING"] * (lengths is not None) + ["CAUSAL"] * is_causal)
    known = [tf.fill(query.shape[:1], n) for n in lengths or ()]
    batch, length, heads, size = query.shape
    scores = batch, heads, length, key.shape[1]
    call = functools.partial(
        _call, scores=scores, fmha_scale=scale, mask_type=masks or "NO_MASK"
    )

    @tf.custom_gradient
    def run(*operands: Any) -> tuple[Any, Callable]:
        query, key, value, *bias = operands
        result, sums = call(
            kind,
            [*operands, *known],
            [((batch, heads, length, size), dtype), (scores[:3], "float32")],
            products=_FORWARD,
        )
        result = _turned(result)

        def derivative(gradient: Tensor) -> list[Any]:
            by_heads = [_turned_shape(x.shape) for x in (query, key, value)]
            shapes = [*by_heads, *(x.shape for x in bias)]
            by_query, by_key, by_value, *by_bias = call(
                f"{kind}Backward",
                [query, key, value, sums, gradient, *bias, result, *known],
                [(shape, dtype) for shape in shapes],
                products=_BACKWARD,
            )
            return [*map(_turned, (by_query, by_key, by_value)), *by_bias]

        return result, derivative

    return run(*operands)


def _turned(x: Tensor) -> Any:
    """Swaps the axes of heads and length."""
    return tf.transpose(x, (0, 2, 1, 3))


def _turned_shape(shape: Any) -> tuple[int, ...]:
    batch, length, heads, size = shape
    return batch, heads, length, size


def _call(
    kind: str,
    operands: Sequence[Any],
    results: Sequence[tuple[Any, Any]],
    products: dict[str, Any],
    scores: tuple[int, ...],
    **config: Any,
) -> list[Any]:
    """One call of cuDNN: its results, but for the memory that it works in."""
    config |= {
        "algorithm": {
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
        },
        "intermediate_tensor_shape": {
            "element_type": _TYPES[operands[0].dtype.name],
            "dimensions": [*map(str, scores)],
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "max_seg_per_batch": 1,
    }
    for name, ((left, right), (heads, other_heads)) in products.items():
        config[name] = {
            "lhs_contracting_dimensions": [str(left)],
            "rhs_contracting_dimensions": [str(right)],
            "lhs_batch_dimensions": ["0", str(heads)],
            "rhs_batch_dimensions": ["0", str(other_heads)],
        }
    *found, _ = private.custom_call(
        f"__cudnn$fmha{kind}",
        operands,
        [tf.TensorSpec(*each) for each in (*results, ((0,), "uint8"))],
        json.dumps({"cudnn_fmha_backend_config": config}),
    )
    return found
