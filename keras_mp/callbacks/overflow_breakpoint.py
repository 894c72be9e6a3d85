"""A breakpoint in `fit`: all that it takes to repeat a step that was skipped."""

import contextlib
import importlib.metadata
import json
import os
import pathlib
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from keras.src.utils import io_utils

from keras_mp.backend.generators import generator_states, set_generator_states
from keras_mp.backend.single_steps import (
    ONCE,
    attached,
    one_at_a_time,
    several_workers,
)
from keras_mp.diagnostics import model_or_weights
from keras_mp.diagnostics.batch import Batch, batch_of
from keras_mp.diagnostics.breakpoint_folder import (
    DIAGNOSIS,
    Overflow,
    check_folder,
    write_facts,
    written_whole,
)
from keras_mp.diagnostics.random_state import seeds_of
from keras_mp.diagnostics.replay import diagnosed
from keras_mp.loss_scale import LossScaleState, check_whole_number
from keras_mp.loss_scale_optimizer import LossScaleOptimizer
from keras_mp.nonfinite import ROWS, added


class OverflowBreakpoint(keras.callbacks.Callback):
    """At the n-th skipped step in a row saves all that it takes to repeat that step.

    Its batch, the weights, the optimizer's state, the loss scale and the random seeds
    as they were before it, and what `keras_mp.diagnose` says of them. `keras-mp replay
    FOLDER` takes the step once more, here or elsewhere. Once in each call of `fit`,
    which goes on and computes what it would have computed without: to end it there is
    `max_consecutive_skips`. A tool to debug with: it waits for the device at each step.
    An optimizer that does not scale is left alone.

    Args:
        folder: where to save. Created if it is missing; what a former breakpoint has
            left there is replaced.
        skips: at which skipped step in a row.

    Raises:
        TypeError: if `folder` is no path.
        ValueError: if there is something else in `folder`; if `skips` is no whole
            number of at least 1; and when `fit` begins on several replicas or
            processes, each of which has but a part of the batch.

    Example:

    ```python
    model.fit(x, y, callbacks=[keras_mp.callbacks.OverflowBreakpoint("overflow")])
    ```
    """

    def __init__(self, folder: str | os.PathLike[str], skips: int = 3) -> None:
        super().__init__()
        check_whole_number("skips", skips)
        self.folder, self.skips = folder, skips
        self._path = check_folder(folder)
        self._epoch, self._watches = 0, False
        self._step: _Step | TypeError | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if others := several_workers(self.model):
            raise ValueError(
                "`OverflowBreakpoint` must see the whole batch of each step: train "
                f"without it, or in one process on one device. Received: {others}."
            )
        # Better now than after hours of training.
        check_folder(self._path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._watches = True

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch + 1

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        if self._watches:
            # Not `self.model`, which on JAX has the state brought back at each step.
            model: Any = self._model
            vars(model)[ONCE] = self._call

    def _call(self, train_function: Callable, args: Sequence[Any]) -> Any:
        """Makes one call of the train function, with its steps in view if need be."""
        model = self._model
        state = args[0] if keras.backend.backend() == "jax" else None
        scaling = _scaling_of(model, state)
        steps = model.steps_per_execution
        if scaling is None and getattr(model.optimizer, "built", True):
            return train_function(*args)  # It does not scale.
        if _skips(scaling) + steps < self.skips:
            return train_function(*args)
        return one_at_a_time(train_function, args, steps, self._before, self._after)

    def _before(self, batch: Any, state: Any) -> None:
        scaling = _scaling_of(self._model, state)
        self._step = None
        if self._watches and _skips(scaling) + 1 >= self.skips:
            try:
                self._step = _Step(batch_of(batch), scaling, generator_states())
            except TypeError as error:
                self._step = error  # Told of only if it is wanted.

    def _after(self, state: Any) -> None:
        step, self._step = self._step, None
        after = _scaling_of(self._model, state)
        if step is None or after is None or _skips(after) < self.skips:
            return
        self._watches = False
        try:
            if isinstance(step, TypeError):
                raise step
            with attached(self._model, state):
                told = self._save(step, after)
        except Exception as error:  # Whatever it is, the training goes on.
            warnings.warn(
                f"{_skips(after)} steps in a row were skipped, and the last could not "
                f"be saved in {os.fspath(self.folder)!r}: {type(error).__name__}: "
                f"{error}. The training goes on.",
                stacklevel=2,
            )
        else:
            io_utils.print_msg(f"\nkeras_mp: {told}")

    def _save(self, step: "_Step", after: "_Scaling") -> str:
        """Saves a step, and returns a line for the user."""
        model, optimizer = self._model, self._model.optimizer
        before = step.scaling or _first(optimizer)
        paths = [v.path for v in optimizer._trainable_variables]
        with (
            written_whole(self._path) as folder,
            _as_before(optimizer, before, step.generators),
        ):
            overflow = Overflow(
                step=int(ops.copy(optimizer.iterations.value))
                + int(after.state.skipped_steps),
                epoch=self._epoch,
                skips=_skips(after),
                loss_scale=float(before.state.scale),
                not_finite=added(before.counts, after.counts, paths),
                variables=paths,
                model=model_or_weights.save(model, folder),
                backend=keras.backend.backend(),
                keras=keras.__version__,
                keras_mp=_version(),
            )
            random_state = step.generators | seeds_of(model)
            write_facts(folder, overflow, step.batch, random_state)
            _write_diagnosis(folder, model, step.batch)
        command = f"keras-mp replay {shlex.quote(os.fspath(self.folder))}"
        if overflow.model == model_or_weights.WEIGHTS:
            command += " --script SCRIPT (its weights alone could be saved, and the "
            command += "script's `build()` has to return the compiled model)"
        return (
            f"{_skips(after)} steps in a row were skipped. The last, step "
            f"{overflow.step}, is saved; to replay it: {command}"
        )


class _Scaling(NamedTuple):
    """The state of loss scaling, and the counts of gradients that were not finite."""

    state: LossScaleState
    counts: np.ndarray


class _Step(NamedTuple):
    """What a step is made of, but for what it leaves as it was if it is skipped."""

    batch: Batch
    scaling: _Scaling | None
    generators: dict[str, np.ndarray]


def _own(optimizer: LossScaleOptimizer) -> list[keras.Variable]:
    return [*optimizer.state_variables, optimizer.nonfinite_counts]


def _scaling_of(model: Any, state: Any) -> _Scaling | None:
    """Reads it from the state on JAX; None if there is none, or none yet."""
    optimizer = model.optimizer
    if not isinstance(optimizer, LossScaleOptimizer) or not optimizer.built:
        return None
    given = state[2] if state else [v.value for v in optimizer.variables]
    values = dict(zip(map(id, optimizer.variables), given, strict=True))
    *scaling, counts = (ops.convert_to_numpy(values[id(v)]) for v in _own(optimizer))
    return _Scaling(LossScaleState(*scaling), counts)


def _first(optimizer: LossScaleOptimizer) -> _Scaling:
    """That of an optimizer which the first step has built."""
    counts = np.zeros((ROWS, len(optimizer._trainable_variables)), "int32")
    return _Scaling(optimizer.rule.initial_state(), counts)


def _skips(scaling: _Scaling | None) -> int:
    return int(scaling.state.consecutive_skips) if scaling else 0


@contextlib.contextmanager
def _as_before(
    optimizer: LossScaleOptimizer, scaling: _Scaling, drawn: Mapping[str, np.ndarray]
) -> Iterator[None]:
    """Puts back for a while what a skipped step has moved."""
    own = _own(optimizer)
    now, drawn_now = [ops.convert_to_numpy(v) for v in own], generator_states()
    try:
        for variable, value in zip(own, [*scaling.state, scaling.counts], strict=True):
            variable.assign(value)
        set_generator_states(drawn)
        yield
    finally:
        for variable, value in zip(own, now, strict=True):
            variable.assign(value)
        set_generator_states(drawn_now)


def _write_diagnosis(folder: pathlib.Path, model: Any, batch: Batch) -> None:
    report = diagnosed(model, batch)
    (folder / f"{DIAGNOSIS}.txt").write_text(f"{report}\n", "utf-8")
    if not isinstance(report, str):
        text = json.dumps(report.to_dict(), indent=1)
        (folder / f"{DIAGNOSIS}.json").write_text(text, "utf-8")
        report.to_html(folder / f"{DIAGNOSIS}.html")


def _version() -> str:
    try:
        return importlib.metadata.version("keras_mp")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
