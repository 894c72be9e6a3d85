"""One training of several, which differ only in the policy and the seed."""

import dataclasses
import gc
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
from keras import ops

import keras_mp.keras_private as private
from keras_mp.backends import engine
from keras_mp.config import policy_scope
from keras_mp.errors import TrainingDivergedError
from keras_mp.policies.layers import is_graph, policy_of
from keras_mp.tools.comparison.stopwatch import Stopwatch
from keras_mp.tools.data import TrainingData
from keras_mp.tools.display.progress_bar import TrainingProgress
from keras_mp.tools.inspection.layer_facts import layers_of
from keras_mp.types import Model

# The models that were trained, so that no policy gets one that has learned already.
_seen: weakref.WeakSet = weakref.WeakSet()


@dataclasses.dataclass(frozen=True)
class Training:
    """The result of a training.

    Attributes:
        policy: its label.
        seed: of the initial weights and the order of the batches.
        metrics: of the validation data, after the training; empty if an error ended it.
        losses: the mean training loss of each epoch.
        seconds_per_step: None if there were too few steps, or every step was skipped.
        peak_memory: in bytes; None if it is not counted.
        skipped_steps: None without a loss scale.
        diverged: why it diverged; empty if it did not.
        compute_dtypes: of each layer; graphs, which compute nothing, are left out.
    """

    policy: str
    seed: int
    metrics: dict[str, float]
    losses: tuple[float, ...]
    seconds_per_step: float | None
    peak_memory: int | None
    skipped_steps: int | None
    diverged: str
    compute_dtypes: tuple[str, ...] = dataclasses.field(repr=False)


class Plan(NamedTuple):
    """What all the trainings have in common: arguments of `compare`."""

    build: Callable[[], Any]
    train: TrainingData
    validation: TrainingData
    epochs: int
    names: dict[str, int]  # See `private.names_given`: before the first training.
    callbacks: Callable[[], Sequence[keras.callbacks.Callback]]


def initial_values(plan: Plan, policy: Any, seed: int) -> list[Any]:
    """The values of a model's variables before its training."""
    with policy_scope(policy):
        return [ops.convert_to_numpy(v) for v in _built(plan, seed).variables]


def train_once(
    plan: Plan,
    label: str,
    policy: Any,
    seed: int,
    initial: Sequence[Any],
    progress: Callable[[float], None],
) -> Training:
    """Trains a new model, its variables at their `initial` values, under a policy.

    `seed` is that of the batches, and `progress` is told how much is done, from 0 to 1.
    """
    gc.collect()  # The memory of the model before would count.
    read_memory = engine.measure_memory()
    stopwatch = Stopwatch()
    with policy_scope(policy):
        model = _built(plan, seed)
        _assign(model, initial)
        keras.utils.set_random_seed(seed)
        diverged, metrics = "", {}
        try:
            model.fit(
                **plan.train.to_fit(),
                epochs=plan.epochs,
                verbose=0,
                callbacks=[*plan.callbacks(), stopwatch, TrainingProgress(progress)],
            )
        except TrainingDivergedError as error:
            diverged = str(error).partition(", at step")[0]
        memory = read_memory()
        if not diverged:
            metrics = model.evaluate(
                **plan.validation.arguments(), verbose=0, return_dict=True
            )
    losses = model.history.history.get("loss", [])
    numbers = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}
    for loss in (*losses[-1:], numbers.get("loss", 0.0)):
        if not math.isfinite(loss):
            diverged = diverged or f"the loss is {loss}"
    skipped = getattr(model.optimizer, "skipped_steps", None)
    in_vain = bool(skipped) and int(model.optimizer.iterations) == 0
    if in_vain:
        diverged = diverged or "every step was skipped"
    return Training(
        policy=label,
        seed=seed,
        metrics=numbers,
        losses=tuple(float(loss) for loss in losses),
        seconds_per_step=None if in_vain else stopwatch.seconds_per_step,
        peak_memory=memory,
        skipped_steps=None if skipped is None else int(skipped),
        diverged=diverged,
        compute_dtypes=tuple(
            policy_of(layer).compute_dtype
            for layer, _ in layers_of(model)
            if not is_graph(layer)
        ),
    )


def _built(plan: Plan, seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    # Layers have the same paths under each policy, which may choose by them.
    private.set_names_given(plan.names)
    model = plan.build()
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`build` must return a compiled keras.Model. Received: build() returned "
            f"{model!r}."
        )
    if not model.compiled:
        raise ValueError(
            "`build` must compile the model that it returns. Received: build() "
            f"returned {model!r}, which is not compiled."
        )
    if model in _seen:
        raise ValueError(
            "`build` must make a new model at each call. Received: build() returned "
            f"{model!r} once more."
        )
    _seen.add(model)
    if not all(layer.built for layer in private.layers_in(model)):
        private.build_from_batch(model, plan.train.first_batch())
    return model


def _assign(model: Model, values: Sequence[Any]) -> None:
    shapes = [tuple(v.shape) for v in model.variables]
    if shapes != [value.shape for value in values]:
        raise ValueError(
            "`build` must return the same model at each call, whatever the policy. "
            f"Received: first one with {_size(x.shape for x in values)}, then one with "
            f"{_size(shapes)}."
        )
    for variable, value in zip(model.variables, values, strict=True):
        variable.assign(value)


def _size(shapes: Iterable[tuple[int, ...]]) -> str:
    sizes = [math.prod(shape) for shape in shapes]
    return f"{sum(sizes)} numbers in {len(sizes)} variables"
