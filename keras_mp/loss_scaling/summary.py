"""The final numbers of each optimizer that a program trained a model with.

`keras-mp run` prints them. The script may have dropped its optimizers by then, so their
counters, a few scalars, are kept here from `start` on.
"""

import dataclasses
from typing import Any

import keras
from keras import ops

import keras_mp.keras_private as private
from keras_mp.config import global_policy
from keras_mp.loss_scaling.optimizer import loss_scaling_of
from keras_mp.policies.hardware import recommended_policy
from keras_mp.types import Optimizer


@dataclasses.dataclass
class Entry:
    """The counters of one optimizer, which outlive it."""

    name: str
    iterations: keras.Variable
    loss_scale: keras.Variable | None
    skipped_steps: keras.Variable | None

    def is_applied(self) -> bool:
        """Has it taken a step, if only one that was skipped?"""
        counts = (self.iterations, self.skipped_steps)
        return any(int(_number(count)) for count in counts if count is not None)

    def __str__(self) -> str:
        steps = f"{int(_number(self.iterations))} steps"
        if self.loss_scale is None:
            return f"{self.name}: no loss scaling, {steps}"
        scale = f"{self.name}: loss scale {float(_number(self.loss_scale)):g}, {steps}"
        if self.skipped_steps is None:  # Keras' own wrapper does not count them.
            return f"{scale}, skipped steps not counted"
        return f"{scale}, {int(_number(self.skipped_steps))} skipped"


def _number(variable: keras.Variable) -> Any:
    # A variable with a value on each of TensorFlow's replicas has no `int`; a copy has.
    return ops.copy(variable.value)


# By id of the counter, which an entry keeps alive; None before `start`.
_entries: dict[int, Entry] | None = None


def start() -> None:
    """Keeps every optimizer from here on, and forgets those before."""
    global _entries
    _entries = {}


def note(optimizer: Optimizer) -> None:
    """Keeps the counters of an optimizer, and of its wrapper."""
    if _entries is None or not isinstance(optimizer, keras.optimizers.Optimizer):
        return
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    steps, scaling = private.applied_steps(inner), loss_scaling_of(optimizer)
    _entries[id(steps)] = Entry(
        name=inner.name,
        iterations=steps,
        loss_scale=getattr(optimizer, "dynamic_scale", None),
        skipped_steps=scaling.skipped_steps if scaling else None,
    )


def of_policy(asked: str) -> str:
    """The policy at the end of a program, and why it is that.

    Args:
        asked: the name of the policy that was set before its first line.
    """
    name, expected, why = global_policy().name, asked, "as --policy says"
    if asked == "auto":
        recommended = recommended_policy()
        expected, why = recommended.name, recommended.reason
    if name != expected:
        return f"policy {name}: the script sets it itself, and --policy is not used"
    return f"policy {name}: {why}"


def lines() -> list[str]:
    """One line for each optimizer: name, final loss scale, steps, skipped steps.

    Leaves out optimizers that were never applied, unless none of them was.
    """
    entries = list((_entries or {}).values())
    applied = [entry for entry in entries if entry.is_applied()]
    return [str(entry) for entry in applied or entries]
