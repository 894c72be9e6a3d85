"""The suite `quality`: does a training come to the same under each policy?"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

import keras_mp
from benchmarks.cases import BACKENDS
from benchmarks.origin import origin
from benchmarks.processes import Job
from benchmarks.quality_tables import STOCK, UNSCALED, WAYS, plot, tables
from benchmarks.quality_tasks import TASKS, Data, Task
from benchmarks.results import Record

__all__ = ["IDENTITY", "NAME", "NAMES", "ON", "ONE_BACKEND", "jobs", "measure", "plot",
           "tables"]  # fmt: skip

NAME = "quality"
IDENTITY = ("case", "backend", "way")
NAMES = tuple(task.name for task in TASKS)
ON = BACKENDS
ONE_BACKEND = True  # unless more are asked for: it takes its time
SEEDS = 5
LIMIT = 600.0


def jobs(
    cases: Sequence[str],
    backends: Sequence[str],
    peers: Sequence[str],
    seconds: float | None,
) -> list[Job]:
    """A process for each task under each policy, all seeds in it."""
    return [
        Job(
            NAME,
            {"case": task.name, "backend": backend, "way": way},
            {},
            limit=LIMIT,
            environment={"TF_ENABLE_ONEDNN_OPTS": "0"},
        )
        for backend in backends
        for task in TASKS
        for way in WAYS
        if task.name in cases and (way != STOCK or task.stock)
    ]


def measure(
    case: str,
    backend: str,
    way: str,
    seeds: int = SEEDS,
    smallest: bool = False,
    tell: Callable[[float], object] = lambda part: None,
    ready: Callable[[], object] = lambda: None,
) -> Iterator[Record]:
    """Trains a task with several seeds; Keras must be running on `backend`.

    Args:
        case: its name.
        backend: of it.
        way: a policy, or a control: "unscaled" is mixed_float16 without loss scaling,
            "stock" is Keras' own mixed_float16, with its own loss scaling.
        seeds: how many: 0, 1, 2, ...; each is of the initial weights and the batches.
        smallest: whether to train on a little of the data for one epoch.
        tell: is told how much of it is done, from 0 to 1.
        ready: is called before the first training.

    Yields:
        Records, each with one seed more in the place of the one before.
    """
    ready()
    task = {task.name: task for task in TASKS}[case]
    data = task.data()
    if smallest:
        data = Data(*(part[: 2 * task.batch] for part in data))
    if way == STOCK:
        keras_mp.keras_seams.seams.uninstall()
    try:
        training = _Training(task, way, data, 1 if smallest else task.epochs)
        values: list[float] = []
        skipped: list[int | None] = []
        start = time.perf_counter()
        for seed in range(seeds):
            tell(seed / seeds)
            values.append(training.ends_with(seed))
            skipped.append(training.skipped_steps)
            yield {
                **origin(),
                "values": values,
                "skipped_steps": skipped,
                "seconds": time.perf_counter() - start,
            }
    finally:
        keras_mp.keras_seams.seams.install()


class _Training:
    """A model that is trained anew with each seed, compiled once."""

    def __init__(self, task: Task, way: str, data: Data, epochs: int) -> None:
        self._task, self._data, self._epochs = task, data, epochs
        self._auto_scale_loss = way != UNSCALED
        self._policy = _policy(way)
        self._model = self._built(0)
        self._state: list[np.ndarray] | None = None

    def _built(self, seed: int) -> Any:
        keras.utils.set_random_seed(seed)
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(self._policy)
        try:
            return self._task.build(self._auto_scale_loss)
        finally:
            keras.config.set_dtype_policy(before)

    def ends_with(self, seed: int) -> float:
        """The metric of the test data after a training; may be nan."""
        optimizer = self._model.optimizer
        if self._state is None:
            optimizer.build(self._model.trainable_variables)
            self._state = [keras.ops.convert_to_numpy(v) for v in optimizer.variables]
        for variable, value in zip(optimizer.variables, self._state, strict=True):
            variable.assign(value)
        self._model.set_weights(self._built(seed).get_weights())
        keras.utils.set_random_seed(seed)
        data = self._data
        self._model.fit(
            data.x,
            data.y,
            batch_size=self._task.batch,
            epochs=self._epochs,
            verbose=0,
        )
        results = self._model.evaluate(
            data.test_x, data.test_y, batch_size=128, verbose=0, return_dict=True
        )
        return float(results[self._task.metric[0]])

    @property
    def skipped_steps(self) -> int | None:
        """Of the last training; None without a loss scale that counts them."""
        skipped = getattr(self._model.optimizer, "skipped_steps", None)
        return None if skipped is None else int(skipped)


def _policy(way: str) -> Any:
    if way == STOCK:
        return keras.DTypePolicy("mixed_float16")
    policy = "mixed_float16" if way == UNSCALED else way
    with keras_mp.policy_scope(policy):
        return keras_mp.global_policy()
