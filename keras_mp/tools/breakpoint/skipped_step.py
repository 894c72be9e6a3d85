"""A skipped step: what it takes to repeat it, and how all of that is saved."""

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

import keras_mp.keras_private as private
from keras_mp.backends import engine
from keras_mp.errors import version_of
from keras_mp.loss_scaling.nonfinite import ROWS, added
from keras_mp.loss_scaling.optimizer import loss_scaling_of
from keras_mp.loss_scaling.schedule import LossScaleState
from keras_mp.loss_scaling.state import LossScaling
from keras_mp.policies.paths import variable_path
from keras_mp.tools.breakpoint import model_file
from keras_mp.tools.breakpoint.batch import Batch, tensors_of
from keras_mp.tools.breakpoint.folder import (
    DIAGNOSIS,
    Overflow,
    put_in_place,
    write_facts,
    written_at_once,
)
from keras_mp.tools.diagnosis.diagnosis import diagnose
from keras_mp.tools.diagnosis.diagnosis_report import Report
from keras_mp.types import Model, Variables

_SEEDS = "seeds"


class Scaling(NamedTuple):
    """The state of loss scaling, and the counts of gradients that were not finite."""

    state: LossScaleState
    counts: np.ndarray

    @property
    def skips(self) -> int:
        """How many steps in a row were skipped."""
        return int(self.state.consecutive_skips)


class Step(NamedTuple):
    """What it takes to repeat a step, without what a skipped step does not change."""

    batch: Batch
    scaling: Scaling | None  # Before the step; None if scaling starts with it.
    generators: dict[str, np.ndarray]  # The framework's, before the step.


def scaling_of(model: Model, state: Any) -> Scaling | None:
    """The state of loss scaling; None if the optimizer does not scale, or not yet.

    `state` has the values that `fit` passes round on JAX, and is None elsewhere.
    """
    optimizer = model.optimizer
    scaling = loss_scaling_of(optimizer)
    if scaling is None:
        return None
    given = state[2] if state else [v.value for v in optimizer.variables]
    values = dict(zip(map(id, optimizer.variables), given, strict=True))
    numbers = [ops.convert_to_numpy(values[id(v)]) for v in scaling.variables]
    counts = np.zeros((ROWS, 0))
    if scaling.nonfinite_counts is not None:
        counts = ops.convert_to_numpy(values[id(scaling.nonfinite_counts)])
    return Scaling(LossScaleState(*numbers), counts)


def save(
    folder: pathlib.Path, model: Model, step: Step, after: Scaling, epoch: int
) -> tuple[Overflow, pathlib.Path]:
    """Saves a step with its diagnosis; `model` and `after` are as it has left them.

    Returns what was saved, and where: beside `folder`, if that holds a breakpoint.
    """
    optimizer = model.optimizer
    scaling: Any = loss_scaling_of(optimizer)
    before = step.scaling or Scaling(scaling.rule.initial_state(), np.zeros(0))
    if not before.counts.size:  # This step has built the optimizer.
        before = Scaling(before.state, np.zeros_like(after.counts))
    paths = [variable_path(v) for v in private.own_trainable(optimizer)]
    applied = int(ops.copy(private.applied_steps(optimizer.inner_optimizer).value))
    with written_at_once(folder) as made:
        with _restored(scaling, before, step.generators):
            overflow = Overflow(
                step=applied + int(after.state.skipped_steps),
                epoch=epoch,
                skips=after.skips,
                loss_scale=float(before.state.scale),
                not_finite=added(before.counts, after.counts, paths),
                variables=paths,
                model=model_file.save(model, made),
                backend=keras.backend.backend(),
                keras=keras.__version__,
                keras_mp=version_of("keras_mp"),
            )
            random_state = step.generators | seeds_of(model)
            write_facts(made, overflow, step.batch, random_state)
            _write_diagnosis(made, model, step.batch)
        return overflow, put_in_place(made, folder)


@contextlib.contextmanager
def _restored(
    scaling: LossScaling,
    before: Scaling,
    generators: Mapping[str, np.ndarray],
) -> Iterator[None]:
    """Restores for a while what a skipped step changes."""
    variables = [*scaling.variables, scaling.nonfinite_counts]
    values = [ops.convert_to_numpy(v) for v in variables]
    generators_now = engine.generator_states()
    try:
        _assign(variables, [*before.state, before.counts])
        engine.set_generator_states(generators)
        yield
    finally:
        _assign(variables, values)
        engine.set_generator_states(generators_now)


def _assign(variables: Variables, values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def seeds_of(model: Model) -> dict[str, np.ndarray]:
    """The states of the seed generators of a model's layers."""
    seeds = [ops.convert_to_numpy(seed) for seed in _seeds(model)]
    return {_SEEDS: np.stack(seeds)} if seeds else {}


def set_random_state(model: Model, states: Mapping[str, np.ndarray]) -> None:
    """Makes the layers of a model draw the same random numbers again.

    `states` are those of `seeds_of` and of `generator_states`. Raises a ValueError if
    the model has a different number of seeds.
    """
    seeds, values = _seeds(model), states.get(_SEEDS, np.zeros((0, 2)))
    if len(values) != len(seeds):
        raise ValueError(
            f"the model must have the {len(values)} random seeds that were saved. "
            f"Received: a model with {len(seeds)}"
        )
    for seed, value in zip(seeds, values, strict=True):
        seed.assign(value.astype(seed.dtype))
    engine.set_generator_states(states)


def _seeds(model: Model) -> list[Any]:
    # `variables` includes the states of the seed generators, `weights` does not.
    weights = {id(weight) for weight in model.weights}
    seeds = [v for v in model.variables if id(v) not in weights]
    return list({id(seed): seed for seed in seeds}.values())


def diagnosed(model: Model, batch: Batch) -> Report | str:
    """The diagnosis of a model by a batch, or why there is none."""
    try:
        parts = keras.utils.unpack_x_y_sample_weight(tensors_of(batch))
        return diagnose(model, *parts)
    except Exception as error:  # A `train_step` of the user's may take any batch.
        return f"There is no diagnosis: {type(error).__name__}: {error}"


def _write_diagnosis(folder: pathlib.Path, model: Model, batch: Batch) -> None:
    report = diagnosed(model, batch)
    (folder / f"{DIAGNOSIS}.txt").write_text(f"{report}\n", "utf-8")
    if not isinstance(report, str):
        text = json.dumps(report.to_dict(), indent=1)
        (folder / f"{DIAGNOSIS}.json").write_text(text, "utf-8")
        report.to_html(folder / f"{DIAGNOSIS}.html")
