"""What a wrapper may hold: one Keras optimizer that no other wrapper holds."""

import dataclasses
import gc
from typing import Any

import keras
from keras import ops

import keras_mp.keras_private as private
from keras_mp.loss_scaling.schedule import LossScaleRule
from keras_mp.rounding.holders import wrapper_of
from keras_mp.rounding.optimizer import parts_of
from keras_mp.types import Optimizer, Variables

_SCALER = keras.optimizers.LossScaleOptimizer
# Arguments of every Keras optimizer, which files of older Keras versions store for the
# wrapper too, at these values.
_INNER_ARGUMENTS = {
    "weight_decay": None,
    "clipnorm": None,
    "global_clipnorm": None,
    "clipvalue": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}


def checked_inner(inner_optimizer: Optimizer) -> Any:
    """The optimizer for an object, a name or a config, if a wrapper may hold it.

    Raises:
        ValueError: if it is no optimizer, scales the loss itself, or has a wrapper.
    """
    inner = inner_optimizer
    # For anything else Keras only says that it cannot interpret it.
    if isinstance(inner, str | dict):
        inner = keras.optimizers.get(inner)
    if isinstance(inner, _SCALER):
        raise ValueError(
            "`inner_optimizer` must not scale the loss itself. Received: "
            f"inner_optimizer={inner_optimizer!r}. Pass the optimizer within it, or "
            "use it as it is."
        )
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise ValueError(
            "`inner_optimizer` must be a Keras optimizer, its name or its config. "
            f"Received: inner_optimizer={inner_optimizer!r}."
        )
    if wrapper_of(inner, _SCALER) is not None:
        gc.collect()  # It may live on in a reference cycle though nobody refers to it.
    if wrapper_of(inner, _SCALER) is not None:
        raise ValueError(
            "`inner_optimizer` must be in one wrapper only. Received: "
            f"inner_optimizer={inner!r}, which another LossScaleOptimizer holds. Use "
            "that one, or create the inner optimizer anew."
        )
    return _of_this_backend(inner)


def _of_this_backend(inner: Optimizer) -> Any:
    """The optimizer itself, or its equivalent if only another backend can run it.

    On torch Keras' optimizers have classes of their own, and files name those. On
    another backend Keras creates them from the file and fails at the first step.
    """
    if private.backend_of(type(inner)) in (None, keras.backend.backend()):
        return inner
    return keras.optimizers.get(
        {"class_name": type(inner).__name__, "config": inner.get_config()}
    )


def written_by(inner: Optimizer, variables: Variables) -> list[Any] | None:
    """What an update writes by `assign`; None if it may write something else.

    Keras' own code writes only by `assign`.
    """
    rates = [private.learning_rate(part) for part in parts_of(inner)]
    constraints = [getattr(v, "constraint", None) for v in variables]
    if all(
        x is None or private.is_keras_own(type(x))
        for x in (*parts_of(inner), *rates, *constraints)
    ):
        return [*variables, *inner.variables]
    return None


def start_averages(inner_optimizer: Optimizer) -> None:
    """Starts the averages of `use_ema` at the weights.

    Keras starts them at zero, which becomes the weights if every step of a short `fit`
    is skipped. The first applied step writes over them either way.
    """
    for part in parts_of(inner_optimizer):
        if not part.use_ema or int(ops.copy(private.applied_steps(part).value)):
            continue
        averages, variables = private.averages(part), private.own_trainable(part)
        for average, variable in zip(averages, variables, strict=True):
            if average is not None:  # None for those overwritten by "gradients".
                # A copy, because JAX donates both buffers at the next step.
                average.assign(ops.copy(variable.value))


def refuse_inner_arguments(kwargs: dict[str, Any]) -> None:
    """Raises a ValueError for arguments that belong to the inner optimizer, or nobody.

    Keras' wrapper takes those of the inner optimizer at their defaults, for old files.
    """
    for name, value in kwargs.items():
        if name in _INNER_ARGUMENTS and value != _INNER_ARGUMENTS[name]:
            raise ValueError(
                f"`{name}` must be set on the `inner_optimizer`, not on the wrapper. "
                f"Received: {name}={value!r}."
            )
    unknown = {k: value for k, value in kwargs.items() if k not in _INNER_ARGUMENTS}
    if unknown:
        own = [field.name for field in dataclasses.fields(LossScaleRule)]
        raise ValueError(
            "LossScaleOptimizer does not support arguments: "
            f"`{'`, `'.join(unknown)}`. Received: {unknown}. It takes "
            f"{', '.join(own)}, max_consecutive_skips, retake_steps and name; set the "
            "inner optimizer's own arguments on it."
        )
