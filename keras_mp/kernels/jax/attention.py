"""Scaled dot-product attention by the fused kernel that the device has."""

from collections.abc import Callable

from keras_mp.kernels.jax import cudnn_attention, splash_attention
from keras_mp.repairs.jax import attention
from keras_mp.types import Tensor


def chosen_by_device(original: Callable) -> Callable:
    """Wraps Keras' `dot_product_attention` in half precision."""
    return attention.in_half_precision(original, _kernels_for)


def _kernels_for(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor
) -> dict[str, Callable]:
    found: dict[str, Callable] = {}
    if cudnn_attention.takes(query, key, value):
        found["cuda"] = cudnn_attention.attend
    if splash_attention.takes(query, key, value, bias, mask):
        found["tpu"] = splash_attention.attend
    return found
