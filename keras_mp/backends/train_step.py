"""What a train step of `fit` returns: its logs, without the step if it was skipped."""

import weakref
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_mp.types import Model, Tensor

# The models whose logs are to hold the loss scale, and with UNDERFLOW the share of
# gradients that underflow, too.
monitored: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
SCALE, UNDERFLOW = "scale", "underflow"
# Model -> a weak reference to a function (train function, its arguments) -> its result.
# It makes the next call of the train function in place of `fit`, and is dropped then.
next_calls: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def logs_of_step(
    model: Model, logs: Any, scaling: Any, undone: Any, measured: Any
) -> Any:
    """The logs of a step, without it if it was undone, and with the loss scale.

    Args:
        model: its variables hold their values after the step.
        logs: what the train step returned.
        scaling: the `LossScaling` of the model's optimizer.
        undone: whether the step was undone; a bool scalar, or False.
        measured: bool scalar, whether earlier steps went into the metrics.
    """
    if not isinstance(logs, dict):
        return logs
    if undone is not False:
        results = model.get_metrics_result()
        logs = _without_step(logs, results, ops.logical_and(undone, measured))
    if model not in monitored:
        return logs
    # As results of the step they reach every logger, and no step waits for them.
    logs = {
        **logs,
        "loss_scale": ops.copy(scaling.scale.value),
        "skipped_steps": ops.copy(scaling.skipped_steps.value),
    }
    underflow = scaling.underflow.take()  # None if nobody asks.
    return logs if underflow is None else {**logs, UNDERFLOW: underflow}


def loss_is_finite(logs: Any) -> Any:
    """Bool scalar: are the numbers of `logs["loss"]` finite? True if there are none."""
    loss = logs.get("loss", 0.0) if isinstance(logs, dict) else 0.0
    numbers = [x for x in keras.tree.flatten(loss) if _is_number(x)]
    return ops.all(ops.stack([ops.all(ops.isfinite(x)) for x in [0.0, *numbers]]))


def any_measured(metrics: Sequence[Any]) -> Any:
    """Bool scalar: has a step gone into the metrics, all zero after `reset_state`?"""
    flags = [ops.any(ops.not_equal(value, 0)) for value in metrics]
    return ops.any(ops.stack(flags)) if flags else ops.convert_to_tensor(False)


def _without_step(logs: dict[str, Any], results: dict[str, Any], undone: Any) -> Any:
    """Replaces logs by the results of the metrics if `undone`.

    At the start of an epoch, metrics that have not measured anything say 0, which would
    pass for the best loss so far: there `undone` is False, and the logs stay.
    """

    def choose(log: Any, result: Any) -> Any:
        log = ops.convert_to_tensor(log)
        return ops.where(undone, ops.cast(result, log.dtype), log)

    return {
        name: keras.tree.map_structure(choose, log, results[name])
        if name in results and _alike(log, results[name])
        else log
        for name, log in logs.items()
    }


def _alike(log: Any, result: Any) -> bool:
    leaves = keras.tree.flatten(log)
    try:
        keras.tree.assert_same_structure(log, result)
    except (ValueError, TypeError):
        return False
    return all(_is_number(x) for x in leaves)


def _is_number(x: Tensor) -> bool:
    return ops.is_tensor(x) or isinstance(x, int | float)
