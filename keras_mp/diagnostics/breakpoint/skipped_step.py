"""A step that was skipped: what it is made of, and how all of it is saved."""

import contextlib
import importlib.metadata
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_mp.backends import engine
from keras_mp.diagnostics.breakpoint import model_or_weights
from keras_mp.diagnostics.breakpoint.batch import Batch
from keras_mp.diagnostics.breakpoint.folder import (
    DIAGNOSIS,
    Overflow,
    write_facts,
    written_whole,
)
from keras_mp.diagnostics.breakpoint.random_state import seeds_of
from keras_mp.diagnostics.breakpoint.replay import diagnosed
from keras_mp.loss_scaling.nonfinite import ROWS, added
from keras_mp.loss_scaling.optimizer import LossScaleOptimizer, loss_scaling_of
from keras_mp.loss_scaling.rule import LossScaleState


class Scaling(NamedTuple):
    """The state of loss scaling, and the counts of gradients that were not finite."""

    state: LossScaleState
    counts: np.ndarray

    @property
    def skips(self) -> int:
        """How many steps in a row were skipped."""
        return int(self.state.consecutive_skips)


class Step(NamedTuple):
    """What a step is made of, but for what it leaves as it was if it is skipped.

    Attributes:
        batch: what it was given.
        scaling: as it was before; None if the step itself let the optimizer scale.
        generators: the states of the framework's random generators before.
    """

    batch: Batch
    scaling: Scaling | None
    generators: dict[str, np.ndarray]


def scaling_of(model: Any, state: Any) -> Scaling | None:
    """Reads the state of loss scaling.

    Args:
        model: the model.
        state: on JAX what `fit` passes round in place of variables, else None.

    Returns:
        None if the optimizer does not scale, or not yet.
    """
    optimizer = model.optimizer
    if not isinstance(optimizer, LossScaleOptimizer):
        return None
    given = state[2] if state else [v.value for v in optimizer.variables]
    values = dict(zip(map(id, optimizer.variables), given, strict=True))
    scaling = [
        ops.convert_to_numpy(values[id(v)])
        for v in loss_scaling_of(optimizer).variables
    ]
    counts = np.zeros((ROWS, 0))
    if optimizer.built:
        counts = ops.convert_to_numpy(
            values[id(loss_scaling_of(optimizer).nonfinite_counts)]
        )
    return Scaling(LossScaleState(*scaling), counts)


def save(
    folder: pathlib.Path, model: Any, step: Step, after: Scaling, epoch: int
) -> Overflow:
    """Saves a step, with the model as it was before and its diagnosis.

    Args:
        folder: to write to.
        model: as it is after the step.
        step: the step.
        after: the state of loss scaling after it.
        epoch: counted from 1.
    """
    optimizer = model.optimizer
    before = step.scaling or Scaling(
        loss_scaling_of(optimizer).rule.initial_state(), np.zeros(0)
    )
    if not before.counts.size:  # The step has built the optimizer.
        before = before._replace(counts=np.zeros_like(after.counts))
    paths = [v.path for v in optimizer._trainable_variables]
    # Not `iterations`, which may count whole windows of accumulated gradients.
    applied = int(ops.copy(optimizer.inner_optimizer._iterations.value))
    with (
        written_whole(folder) as made,
        _as_before(optimizer, before, step.generators),
    ):
        overflow = Overflow(
            step=applied + int(after.state.skipped_steps),
            epoch=epoch,
            skips=after.skips,
            loss_scale=float(before.state.scale),
            not_finite=added(before.counts, after.counts, paths),
            variables=paths,
            model=model_or_weights.save(model, made),
            backend=keras.backend.backend(),
            keras=keras.__version__,
            keras_mp=_version(),
        )
        random_state = step.generators | seeds_of(model)
        write_facts(made, overflow, step.batch, random_state)
        _write_diagnosis(made, model, step.batch)
    return overflow


@contextlib.contextmanager
def _as_before(
    optimizer: LossScaleOptimizer, before: Scaling, drawn: Mapping[str, np.ndarray]
) -> Iterator[None]:
    """Puts back for a while what a skipped step has moved."""
    scaling = loss_scaling_of(optimizer)
    own = [*scaling.variables, scaling.nonfinite_counts]
    now, drawn_now = [ops.convert_to_numpy(v) for v in own], engine.generator_states()
    try:
        for variable, value in zip(own, [*before.state, before.counts], strict=True):
            variable.assign(value)
        engine.set_generator_states(drawn)
        yield
    finally:
        for variable, value in zip(own, now, strict=True):
            variable.assign(value)
        engine.set_generator_states(drawn_now)


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
