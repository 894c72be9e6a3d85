"""The suite `quality`: does a training end the same under each policy?"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

import keras_mp
from benchmarks import BACKENDS
from benchmarks.origin import origin
from benchmarks.quality.quality_tables import KERAS, SLOTS, UNSCALED, tables, ways
from benchmarks.quality.tasks import TASKS, Data, Task
from benchmarks.results import Record
from benchmarks.suites import Suite
from keras_mp.seams import install, uninstall

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
        way: a policy, or "bfloat16 slots", which is float32 with the moments of the
            optimizer in bfloat16, or a control: "unscaled" is mixed_float16 without
            loss scaling, "Keras' bfloat16" is Keras' own policy without this package.
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
    if way.startswith(KERAS):
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
    """A model that is compiled once and trained from the start with each seed."""

    def __init__(self, task: Task, way: str, data: Data, epochs: int) -> None:
        self._task, self._data, self._epochs = task, data, epochs
        self._model, optimizer, compiled_with = _built(task, _policy(way))
        if way == SLOTS:
            optimizer = keras_mp.StochasticRoundingOptimizer(optimizer, "bfloat16")
        self._model.compile(optimizer, auto_scale_loss=way != UNSCALED, **compiled_with)
        self._state: list[np.ndarray] | None = None

    def begin(self, seed: int) -> None:
        """Initial weights and states, the same under every policy."""
        optimizer = self._model.optimizer
        if self._state is None:
            optimizer.build(self._model.trainable_variables)
            self._state = [keras.ops.convert_to_numpy(v) for v in optimizer.variables]
        for variable, value in zip(optimizer.variables, self._state, strict=True):
            variable.assign(value)
        # Drawn in float32, because a draw in bfloat16 gives other numbers.
        model, *_ = _built(self._task, keras.DTypePolicy("float32"), seed)
        self._model.set_weights(model.get_weights())

    def ends_with(self, seed: int) -> float:
        """The metric on the test data after a training; it may be nan."""
        self.begin(seed)
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
        """The skipped steps of the last training; None if nothing counts them."""
        skipped = getattr(self._model.optimizer, "skipped_steps", None)
        return None if skipped is None else int(skipped)


def _built(task: Task, policy: Any, seed: int = 0) -> tuple[Any, Any, dict[str, Any]]:
    keras.utils.set_random_seed(seed)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        return task.build()
    finally:
        keras.config.set_dtype_policy(before)


def _policy(way: str) -> Any:
    if way.startswith(KERAS):
        return keras.DTypePolicy(way.removeprefix(KERAS))
    if way == SLOTS:
        return keras.DTypePolicy("float32")
    return keras_mp.Policy("mixed_float16" if way == UNSCALED else way)


SUITE = Suite(
    "quality",
    [
        {"case": task.name, "backend": backend, "way": way}
        for backend in BACKENDS
        for task in TASKS
        for way in ways(task)
    ],
    measure,
    tables,
    slow=[task.name for task in TASKS if not task.is_possible],
    in_short=["words", "small-steps", "sigmoids", "regression"],
    one_backend=True,  # It takes long.
    limit=1800.0,
    environment=lambda about: {"TF_ENABLE_ONEDNN_OPTS": "0"},
)
