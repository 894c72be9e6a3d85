"""The suite `quality`: does a training end the same under each policy?"""

import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras

import keras_mp
import keras_mp.keras_private as private
from benchmarks import BACKENDS
from benchmarks.origin import origin
from benchmarks.quality.quality_tables import KERAS, SLOTS, UNSCALED, tables, ways
from benchmarks.quality.tasks import TASKS, Data, Task
from benchmarks.results import Record
from benchmarks.suites import Suite
from keras_mp.installing import uninstall
from keras_mp.policies.policy import FLOAT32
from keras_mp.tools.comparison.training import Plan, initial_values, train_once
from keras_mp.tools.data import TrainingData

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
    plan = Plan(
        functools.partial(built, task, way),
        TrainingData("train", (data.x, data.y), task.batch),
        TrainingData("validation", (data.test_x, data.test_y), 128),
        1 if smallest else task.epochs,
        private.names_given(),
        callbacks=list,
    )
    if way.startswith(KERAS):
        uninstall()
    try:
        values: list[float] = []
        skipped: list[int | None] = []
        start = time.perf_counter()

        def show(part: float) -> None:
            progress((len(values) + part) / seeds)

        for seed in range(seeds):
            # In float32, because a draw in bfloat16 gives other numbers.
            initial = initial_values(plan, FLOAT32, seed)
            training = train_once(plan, way, _policy(way), seed, initial, show)
            values.append(training.metrics.get(task.metric[0], math.nan))
            skipped.append(training.skipped_steps)
            yield {
                **origin(),
                "values": values,
                "skipped_steps": skipped,
                "seconds": time.perf_counter() - start,
            }
    finally:
        uninstall()


def built(task: Task, way: str) -> keras.Model:
    """The compiled model of a task, under the global policy."""
    if way.startswith(KERAS):
        keras.config.set_dtype_policy(way.removeprefix(KERAS))
    model, optimizer, compiled_with = task.build()
    if way == SLOTS:
        optimizer = keras_mp.StochasticRoundingOptimizer(optimizer, "bfloat16")
    model.compile(optimizer, auto_scale_loss=way != UNSCALED, **compiled_with)
    return model


def _policy(way: str) -> Any:
    if way == SLOTS or way.startswith(KERAS):  # That sets its own by Keras' name.
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
