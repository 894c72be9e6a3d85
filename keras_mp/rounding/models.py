"""Stochastic rounding of models: which optimizers need it."""

from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp.backends.interface import BFLOAT16
from keras_mp.policies.choosing import chooser_for
from keras_mp.policies.layers import is_graph
from keras_mp.policies.weights import has_bfloat16
from keras_mp.rounding.holders import hold, wrapped
from keras_mp.rounding.optimizer import StochasticRoundingOptimizer
from keras_mp.types import Layer, Model, Optimizer


def rounds_weights(model: Model) -> bool:
    """Has a `ChoosingPolicy` made a trainable weight of the model bfloat16?

    For a layer that is not built: will it? Keras' own policies do not ask for this.
    """
    return any(
        _has_bfloat16_weights(layer)
        for layer in private.layers_in(model)
        if not (is_graph(layer) or isinstance(layer, keras.layers.InputLayer))
    )


def _has_bfloat16_weights(layer: Layer) -> bool:
    chooser = chooser_for(layer)
    if chooser is None or chooser.variable_dtype != BFLOAT16:
        return False
    if not layer.built:
        return bool(layer.variable_dtype == BFLOAT16)
    # The parts of an attention layer are under a stock policy.
    return has_bfloat16(layer.trainable_variables)


def rounded(optimizer: Optimizer) -> Any:
    """The optimizer in a wrapper that rounds; one that scales the loss stays outside.

    Anything that is no optimizer, or rounds already, stays as it is.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        inner = optimizer.inner_optimizer
        if not isinstance(inner, StochasticRoundingOptimizer):
            optimizer.inner_optimizer = wrapped(inner, StochasticRoundingOptimizer)
            hold(optimizer, optimizer.inner_optimizer)
        return optimizer
    if isinstance(optimizer, StochasticRoundingOptimizer | None):
        return optimizer
    return wrapped(optimizer, StochasticRoundingOptimizer)
