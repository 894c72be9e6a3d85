"""`replay`: repeats the step that a breakpoint has saved."""

import dataclasses
import os
import pathlib
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import keras
from keras import ops

import keras_mp.keras_private as private
from keras_mp.backends import engine
from keras_mp.errors import BreakpointError
from keras_mp.loss_scaling.nonfinite import added, named
from keras_mp.loss_scaling.optimizer import loss_scaling_of
from keras_mp.tools.breakpoint import model_file
from keras_mp.tools.breakpoint.batch import tensors_of
from keras_mp.tools.breakpoint.folder import Overflow, read
from keras_mp.tools.breakpoint.skipped_step import diagnosed, set_random_state
from keras_mp.tools.diagnosis.diagnosis_report import Report


@dataclasses.dataclass(frozen=True, repr=False)
class Replay:
    """What a saved step did, and what it does here.

    Attributes:
        saved: what was saved about it.
        not_finite: path in the saved run -> "inf", "nan" or "inf, nan" in its gradient
            here.
        report: the diagnosis, or a sentence that says why there is none.
    """

    saved: Overflow
    not_finite: dict[str, str]
    report: Report | str

    def __str__(self) -> str:
        saved = self.saved
        lines = [
            f"Saved: step {saved.step}, in epoch {saved.epoch}, at loss scale "
            f"{saved.loss_scale:g}, with {saved.skips} skipped in a row; "
            f"{saved.backend}, Keras {saved.keras}, keras_mp {saved.keras_mp}. "
            f"Not finite: {_text(saved.not_finite)}.",
            f"Here, on {keras.backend.backend()}: {self._again()}",
        ]
        text = "\n".join(textwrap.fill(line, 80) for line in lines)
        return f"{text}\n\n{self.report}"

    __repr__ = __str__

    def _again(self) -> str:
        if not self.not_finite:
            return "it does not overflow, every gradient is finite at that scale."
        if self.not_finite.keys() == self.saved.not_finite.keys():
            return "it overflows again, in the gradients of the same variables."
        return f"it overflows too. Not finite: {_text(self.not_finite)}."


def _text(not_finite: Mapping[str, str]) -> str:
    return named([f"{path} ({kind})" for path, kind in not_finite.items()])


def replay(
    folder: str | os.PathLike[str],
    *,
    build: Callable[[], Any] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
) -> Replay:
    """Repeats a step that `OverflowBreakpoint` has saved, and diagnoses it.

    It has the same weights, batch and loss scale, and the same random numbers if this
    version and backend draw them.

    Args:
        folder: the folder that was given to `OverflowBreakpoint`. It stays as it is.
        build: returns the compiled model; needed if only its weights could be saved.
        custom_objects: name -> a class or function of the model that is not registered
            with Keras.

    Returns:
        A `Replay`, which prints.

    Raises:
        BreakpointError: if there is no breakpoint, or it is damaged, or the model
            cannot be opened.

    Example:

    ```python
    print(keras_mp.tools.breakpoint.replay.replay("overflow"))
    ```
    """
    overflow, batch, random_state = read(folder)
    try:
        data = tensors_of(batch)
        x = keras.utils.unpack_x_y_sample_weight(data)[0]
    except (KeyError, TypeError, ValueError) as error:
        raise BreakpointError(f"the batch in {str(folder)!r}: {error}") from error
    if x is None:
        raise BreakpointError(
            f"the batch in {str(folder)!r} must have an `x`. Received: none: the file "
            "has been changed since it was saved"
        )
    file = pathlib.Path(folder, overflow.model)
    model = model_file.load(file, x, build, custom_objects)
    optimizer, paths = model.optimizer, overflow.variables
    count = len(private.own_trainable(optimizer))
    if len(paths) != count:
        raise BreakpointError(
            f"the model must have the {len(paths)} trainable variables that it had. "
            f"Received: a model with {count}"
        )
    optimizer.dynamic_scale.assign(overflow.loss_scale)
    try:
        set_random_state(model, random_state)
    except ValueError as error:
        raise BreakpointError(f"{error}: {model_file.REMEDY}") from error
    report = diagnosed(model, batch)
    scaling: Any = loss_scaling_of(optimizer)
    counts = scaling.nonfinite_counts
    before = ops.convert_to_numpy(counts)
    engine.take_step(model, data)
    after = ops.convert_to_numpy(counts)
    return Replay(overflow, added(before, after, paths), report)
