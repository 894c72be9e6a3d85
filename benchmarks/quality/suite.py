"""The suite `quality`: does a training end the same under each policy?"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

import keras_mp
from benchmarks import BACKENDS
from benchmarks.origin import origin
from benchmarks.quality.tables import STOCK, UNSCALED, WAYS, tables
from benchmarks.quality.tasks import TASKS, Data, Task
from benchmarks.results import Record
from benchmarks.suites import Suite
from keras_mp.keras_seams.seams import install, uninstall

SEEDS = 5


def measure(
    case: str,
    backend: str,
    way: str,
    seeds: int = SEEDS,
    smallest: bool = False,
    progress: Callable[[float], object] = lambda part: None,
    ready: Callable[[], object] = lambda: None,
) -> Iterator[Record]:
    """Trains a task with several seeds; Keras must run on `backend`.

    Args:
        case: the name of the task.
        backend: the backend.
        way: a policy, or a control: "unscaled" is mixed_float16 without loss scaling,
            "stock" is Keras' own mixed_float16 with its own loss scaling.
        seeds: how many seeds, from 0; a seed fixes the initial weights and the batches.
        smallest: whether to train on a little of the data for one epoch.
        progress, ready: see `Suite.measure`.

    Yields:
        Records, each with one more seed in place of the one before.
    """
    ready()
    task = {task.name: task for task in TASKS}[case]
    data = task.data()
    if smallest:
        data = Data(*(part[: 2 * task.batch] for part in data))
    if way == STOCK:
        uninstall()
    try:
        training = _Training(task, way, data, 1 if smallest else task.epochs)
        values: list[float] = []
        skipped: list[int | None] = []
        start = time.perf_counter()
        for seed in range(seeds):
            progress(seed / seeds)
            values.append(training.ends_with(seed))
            skipped.append(training.skipped_steps)
            yield {
                **origin(),
                "values": values,
                "skipped_steps": skipped,
                "seconds": time.perf_counter() - start,
            }
    finally:
        install()


class _Training:
    """A model that is compiled once and trained anew with each seed."""

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
        """The metric on the test data after a training; it may be nan."""
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
        """Of the last training; None if nothing counts them."""
        skipped = getattr(self._model.optimizer, "skipped_steps", None)
        return None if skipped is None else int(skipped)


def _policy(way: str) -> Any:
    if way == STOCK:
        return keras.DTypePolicy("mixed_float16")
    policy = "mixed_float16" if way == UNSCALED else way
    with keras_mp.policy_scope(policy):
        return keras_mp.global_policy()


SUITE = Suite(
    "quality",
    [
        {"case": task.name, "backend": backend, "way": way}
        for backend in BACKENDS
        for task in TASKS
        for way in WAYS
        if way != STOCK or task.stock
    ],
    measure,
    tables,
    one_backend=True,  # It takes long.
    environment=lambda about: {"TF_ENABLE_ONEDNN_OPTS": "0"},
)
