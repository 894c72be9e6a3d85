"""Kernels that `fit` does not move, because half precision makes their gradient 0.

A sum that overflows can do it: what is divided by infinity is 0, and so is its
gradient. Nothing is infinite, no step is skipped, and the layers before it never learn.

    before the first step  the bits of each trainable variable are summed
    every 100 steps        they are summed again, until any sum differs
    then, for one batch    are there kernels in half precision whose sums are the same,
                           with gradients of 0 that are not 0 in float32?

So frozen layers, a learning rate of 0, accumulation, what the loss does not depend on
and units that are dead in float32, too, are not told.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

import keras_mp.keras_private as private
from keras_mp.backends import engine
from keras_mp.loss_scaling.nonfinite import named
from keras_mp.loss_scaling.one_batch import gradients_of
from keras_mp.loss_scaling.optimizer import loss_scaling_of
from keras_mp.messages import warn
from keras_mp.policies.paths import variable_path
from keras_mp.policies.temporary import (
    computes_in_half,
    half_in_float32,
    temporary_policies,
)
from keras_mp.types import Model, Tensor

STEPS = 100


class KernelWatch:
    """Watches the first steps of one train function of a model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._steps = 0
        self._before: dict[int, Any] = {}
        self.done = False

    def around(self, train_function: Callable, args: Sequence[Any]) -> Callable:
        """What to call in place of a train function that `fit` calls with `args`."""
        model = self._model
        if not (self._before or self.done) and model.built:
            self.done = not _kernels(model) or bool(engine.other_workers(model))
            if not self.done:
                self._before = _sums_of_bits(model, args)
        elif self._before and self._steps >= STEPS:
            self._steps = 0
            now = _sums_of_bits(model, args)
            known = now.keys() & self._before.keys()
            still = {i for i in known if _equal(now[i], self._before[i])}
            if len(still) < len(known):
                self.done, self._before = True, {}
                kernels = [v for v in _kernels(model) if id(v) in still]
                if kernels:
                    return functools.partial(_call, model, kernels, train_function)
        self._steps += model.steps_per_execution
        return train_function


def _kernels(model: Model) -> list[Any]:
    """The trainable weights of layers in half precision, except vectors."""
    half = [layer for layer in private.layers_in(model) if computes_in_half(layer)]
    return [v for layer in half for v in private.own_trainable(layer) if v.ndim > 1]


def _sums_of_bits(model: Model, args: Sequence[Any]) -> dict[int, Any]:
    variables = model.trainable_variables
    values = engine.trainable_values(model, args)
    pairs = zip(variables, values, strict=True)
    return {id(v): engine.sums_of_bits(value) for v, value in pairs}


def _equal(a: Any, b: Any) -> bool:
    return np.array_equal(ops.convert_to_numpy(a), ops.convert_to_numpy(b))


def _call(
    model: Model, kernels: Sequence[Any], train_function: Callable, *args: Any
) -> Any:
    """Calls a train function, after a look at the gradients of its first batch."""
    looked = False

    def take(batch: Any, state: Any, once: Callable) -> tuple[Any, Any]:
        nonlocal looked
        if not looked:
            looked = True
            with engine.attached(model, state):
                _tell(model, kernels, batch)
        return once(state)

    return engine.run_by_batch(train_function, args, model.steps_per_execution, take)


def _tell(model: Model, kernels: Sequence[Any], batch: Any) -> None:
    try:
        given = keras.utils.unpack_x_y_sample_weight(batch)
        scaling = loss_scaling_of(model.optimizer)
        scale = 1.0 if scaling is None else float(ops.copy(scaling.scale.value))
        compiled = model.jit_compile and not model.run_eagerly
        by_kernels = functools.partial(
            gradients_of,
            model,
            given,
            watch=lambda _: contextlib.nullcontext(),
            compiled=compiled,
            variables=kernels,
        )
        half = by_kernels(scale)
        with temporary_policies(model, half_in_float32):
            wide = by_kernels(1.0)
    except Exception:  # A loss of its own, or too little memory: nothing is known.
        return
    found = zip(kernels, half.by_variable, wide.by_variable, strict=True)
    lost = [v for v, narrow, wide in found if not _any(narrow) and _any(wide)]
    if not lost:
        return
    dtypes = {x.compute_dtype for x in private.layers_in(model) if computes_in_half(x)}
    warn(
        f"{len(lost)} of {len(_kernels(model))} kernels in half precision are bit for "
        "bit what they were when the training began: "
        f"{named([variable_path(v) for v in lost])}. Their gradients are 0 in "
        f"{' and '.join(sorted(dtypes))}, but not in float32: an operation between "
        "them and the loss overflows or underflows. Find the layer: "
        "print(keras_mp.diagnose(model, x, y))"
    )


def _any(gradient: Tensor) -> bool:
    return gradient is not None and bool(np.any(gradient))
