"""BatchNormalization in half precision by torch's own kernel, statistics in float32.

In Keras it takes, with its gradient, some fifty operations in float32.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import torch

import keras_mp.keras_private as private
from keras_mp.backends.interface import HALF
from keras_mp.types import Layer, Tensor


def in_one_kernel(original: Callable) -> Callable:
    """Wraps `BatchNormalization.call`."""

    @functools.wraps(original)
    def call(self: Any, inputs: Any, training: Any = None, mask: Tensor = None) -> Any:
        learns = bool(training and self.trainable)
        if mask is not None or not _has_kernel(self, inputs, learns):
            return original(self, inputs, training=training, mask=mask)
        return _normalized(self, inputs, learns)

    return call


def _has_kernel(layer: Layer, x: Tensor, learns: bool) -> bool:
    return (
        type(layer) is keras.layers.BatchNormalization
        and isinstance(x, torch.Tensor)
        and layer.compute_dtype in HALF
        and keras.backend.standardize_dtype(x.dtype) == layer.compute_dtype
        and layer.moving_mean.dtype == "float32"
        # torch computes no variance of a single number.
        and (not learns or x.numel() > x.shape[layer.axis])
        and not (learns and (getattr(layer, "renorm", False) or layer.synchronized))
        and private.get_stateless_scope() is None
    )


def _normalized(layer: Layer, x: torch.Tensor, learns: bool) -> torch.Tensor:
    axis = layer.axis % x.ndim
    # torch wants channels second. If they are last, all else becomes one dimension.
    seen = x.reshape(-1, x.shape[-1]) if axis == x.ndim - 1 else x.movedim(axis, 1)
    mean, variance = (
        private.raw_value(v) for v in (layer.moving_mean, layer.moving_variance)
    )
    number = x.numel() // x.shape[axis]
    if learns:
        # torch averages the unbiased variance, Keras the variance of the batch. This
        # bypasses autograd, which holds the averages but reads them only in inference.
        variance.data.mul_(number / (number - 1))
    y = torch.nn.functional.batch_norm(
        seen,
        mean,
        variance,
        layer.gamma.value if layer.scale else None,
        layer.beta.value if layer.center else None,
        training=learns,
        momentum=1 - layer.momentum,
        eps=layer.epsilon,
    )
    if learns:
        variance.data.mul_((number - 1) / number)
    return y.reshape(x.shape) if axis == x.ndim - 1 else y.movedim(1, axis)
