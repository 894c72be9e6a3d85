"""The logs of a train step: without it if it was skipped, and with the loss scale."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

# Set on a model whose logs are to tell of its loss scale; to UNDERFLOW if they are to
# tell of underflowing gradients as well.
MONITORED = "_keras_mp_monitored"
UNDERFLOW = "underflow"


def with_scale(
    model: Any, logs: Any, scale: Any, skipped_steps: Any, underflow: Any
) -> Any:
    """The logs with the loss scale after the step, if the model is monitored.

    Among a step's own results they reach every logger, and no step waits for them.
    """
    if not isinstance(logs, dict) or MONITORED not in vars(model):
        return logs
    logs = {**logs, "loss_scale": scale, "skipped_steps": skipped_steps}
    return logs if underflow is None else {**logs, UNDERFLOW: underflow}


def loss_is_finite(logs: Any) -> Any:
    """Bool scalar: are the numbers of `logs["loss"]` finite? None at all are."""
    loss = logs.get("loss", 0.0) if isinstance(logs, dict) else 0.0
    numbers = [x for x in keras.tree.flatten(loss) if _is_number(x)]
    return ops.all(ops.stack([ops.all(ops.isfinite(x)) for x in [0.0, *numbers]]))


def any_measured(metrics: Sequence[Any]) -> Any:
    """Bool scalar: has a step gone into the metrics since they were reset?

    Args:
        metrics: the values of their variables, all zero after `reset_state`.
    """
    flags = [ops.any(ops.not_equal(value, 0)) for value in metrics]
    return ops.any(ops.stack(flags)) if flags else ops.convert_to_tensor(False)


def without_step(logs: Any, results: dict[str, Any], undone: Any, before: Any) -> Any:
    """The logs as they would be without the step.

    At the beginning of an epoch metrics say 0 of what they never measured, which would
    pass for the best loss so far: there the log of the step itself stays.

    Args:
        logs: what the train step returned.
        results: the results of the metrics as they are after it was undone.
        undone: bool scalar, whether it was.
        before: bool scalar, whether steps before it had been measured.
    """
    if not isinstance(logs, dict):
        return logs

    def choose(log: Any, result: Any) -> Any:
        log = ops.convert_to_tensor(log)
        result = ops.cast(result, log.dtype)
        return ops.where(ops.logical_and(undone, before), result, log)

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


def _is_number(x: Any) -> bool:
    return ops.is_tensor(x) or isinstance(x, int | float)
