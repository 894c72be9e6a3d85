"""The suite `seams`: what keras_mp costs outside of the optimizer's update.

A layer's call, `import keras_mp`, a step of `fit`, tracing and compiling a step.
"""

import contextlib
import functools
import gc
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

import keras_mp
from benchmarks import models
from benchmarks.cases import BACKENDS, case_named
from benchmarks.origin import origin
from benchmarks.pairs import CONTROL, is_conclusive, quartiles, time_in_pairs
from benchmarks.processes import CAN_PIN, Job
from benchmarks.results import Record
from benchmarks.seams_tables import CASES, plot, tables
from benchmarks.steps import engine
from keras_mp.backends.train_step import MONITORED

__all__ = ["IDENTITY", "NAME", "NAMES", "ON", "jobs", "measure", "plot", "tables"]

NAME = "seams"
IDENTITY = ("case", "backend")
NAMES = tuple(CASES)
ON = BACKENDS
SECONDS = 4.0
LIMIT = 600.0
CALLS = 200  # of a layer, in what is timed as a step: the seams come and go before it
IMPORTS = 3
# How often, and what: a thousand variables take Keras' own wrapper too long.
_BOTH = {"keras_mp": "", "keras": ", Keras' own wrapper"}
COMPILATIONS = {
    "compile-10": (15, _BOTH),
    "compile-100": (31, _BOTH),
    "compile-1000": (5, {"keras_mp": ""}),
}
WHEN_NAMED = tuple(COMPILATIONS)


def jobs(
    cases: Sequence[str],
    backends: Sequence[str],
    peers: Sequence[str],
    seconds: float | None,
) -> list[Job]:
    """One process for each case on each backend, on one pinned core."""
    return [
        Job(
            NAME,
            {"case": case, "backend": backend},
            {"seconds": seconds or SECONDS},
            limit=LIMIT,
            ahead=CAN_PIN,
            pinned=True,
        )
        # What takes long to prepare side by side: the next one is under way.
        for case in NAMES
        for backend in backends
        # Only JAX can be asked to trace and to compile, and not to run.
        if case in cases and (case not in COMPILATIONS or backend == "jax")
    ]


def measure(
    case: str,
    backend: str,
    seconds: float = SECONDS,
    smallest: bool = False,
    tell: Callable[[float], object] = lambda part: None,
    ready: Callable[[], object] = lambda: None,
) -> Iterator[Record]:
    """Measures a case; Keras must be running on `backend`.

    Args:
        case: its name.
        backend: of it.
        seconds: for the timing.
        smallest: whether to take the smallest sizes, once.
        tell: is told how much of it is done, from 0 to 1.
        ready: is called before the timing.

    Yields:
        One record: `ratios` over Keras without keras_mp, with `control` and whether it
        is `conclusive` where they are of pairs; or `seconds`.
    """
    if case == "layer-call":
        found = _in_pairs(_layer_calls(), seconds, tell, ready)
    elif case == "fit":
        found = _in_pairs(_fits(smallest), seconds, tell, ready)
    elif case == "import":
        times = _imports(1 if smallest else IMPORTS, ready)
        found = {"seconds": {"import keras_mp": times}}
    else:
        ready()
        number, names = COMPILATIONS[case]
        sizes = case.replace("compile", "no-jit")
        rounds = 1 if smallest else number
        found = {"ratios": _compilations(sizes, names, rounds, smallest)}
    yield {**origin(), **found}


def _in_pairs(
    runs: dict[str, Callable[[int], None]],
    seconds: float,
    tell: Callable[[float], object],
    ready: Callable[[], object],
) -> dict[str, Any]:
    base = runs.pop("")
    base(1)
    for run in runs.values():
        run(1)
    ready()
    timings = time_in_pairs(base, runs, seconds, tell=tell)
    control = timings.pop(CONTROL)
    return {
        "ratios": {name: t.ratio._asdict() for name, t in timings.items()},
        "control": control.ratio._asdict(),
        "conclusive": is_conclusive(control.ratio),
        "base_seconds": control.base_seconds._asdict(),
    }


# A layer's call -------------------------------------------------------------------


def _layer_calls() -> dict[str, Callable[[int], None]]:
    layer = keras.layers.Dense(8)
    x = keras.ops.ones((8, 8))
    layer(x)  # Under the seams it comes by its policy here.

    def calls(number: int) -> None:
        y = x
        for _ in range(CALLS * number):
            y = layer(x)
        keras.ops.convert_to_numpy(y)

    def without(number: int) -> None:
        keras_mp.keras_seams.seams.uninstall()
        try:
            calls(number)
        finally:
            keras_mp.keras_seams.seams.install()

    def with_seams(number: int) -> None:
        # As often as the others, so that what toggling costs is on both sides.
        keras_mp.keras_seams.seams.uninstall()
        keras_mp.keras_seams.seams.install()
        calls(number)

    return {"": without, CONTROL: without, "a layer's call": with_seams}


# `fit` ------------------------------------------------------------------------------


def _fits(smallest: bool) -> dict[str, Callable[[int], None]]:
    """Epochs of `fit`, with and without what we do there.

    All of one model: where in memory a model lies made a hundredth of a step.
    """
    keras.utils.set_random_seed(0)
    # As many steps as make what `fit` does but once next to nothing.
    side, steps, batch = (4, 2, 2) if smallest else (32, 20, 16)
    filters, stages = (2, 1) if smallest else (16, 2)
    model = models.convolutions(side, filters, stages, classes=10)
    generator = np.random.default_rng(0)
    x = generator.standard_normal((steps * batch, side, side, 3), dtype="float32")
    y = generator.integers(0, 10, steps * batch)
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.Adam(1e-4))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])

    def fit(train_function: Any, callbacks: Sequence[Any], epochs: int) -> None:
        model.train_function = train_function
        vars(model).pop(MONITORED, None)
        if callbacks:
            vars(model)[MONITORED] = True
        model.fit(
            x,
            y,
            batch_size=batch,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=[*callbacks],
        )

    def made(with_seams: bool = True, callbacks: Sequence[Any] = ()) -> Any:
        if not with_seams:
            # What the train function is made of stays when they come back.
            keras_mp.keras_seams.seams.uninstall()
        try:
            fit(None, callbacks, 1)
        finally:
            keras_mp.keras_seams.seams.install()
        return functools.partial(fit, model.train_function, callbacks)

    return {
        "": made(with_seams=False),
        CONTROL: made(with_seams=False),
        "rollback of statistics and metrics": made(),
        "and LossScaleMonitor": made(callbacks=[keras_mp.callbacks.LossScaleMonitor()]),
    }


# `import keras_mp` --------------------------------------------------------------------

_IMPORT = """
import time
import keras
print(flush=True)
input()
start = time.perf_counter()
import keras_mp
print(time.perf_counter() - start)
"""


def _imports(number: int, ready: Callable[[], object]) -> dict[str, float]:
    with contextlib.ExitStack() as ended:
        waiting = [_with_keras(ended) for _ in range(number)]
        ready()
        times = [float(process.communicate("go")[0]) for process in waiting]
    return quartiles(times)._asdict()


def _with_keras(ended: contextlib.ExitStack) -> subprocess.Popen:
    """A process that has imported Keras."""
    process = subprocess.Popen(
        [sys.executable, "-c", _IMPORT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    ended.enter_context(process)
    ended.callback(process.kill)
    assert process.stdout
    process.stdout.readline()
    return process


# Tracing and compiling ----------------------------------------------------------------


def _compilations(
    case: str, names: dict[str, str], number: int, smallest: bool
) -> dict[str, Any]:
    steps = engine("jax")
    makers = {name: steps.scaled[name] for name in names}
    makers[""] = steps.unscaled["keras"]
    ratios: dict[str, list[float]] = {}
    order = random.Random(0)
    # What Python does but once is done in a small round, which does not count.
    for tiny in (True, *[smallest] * number):
        times = {
            name: _stages(makers[name](case_named(case).problem(tiny), True))
            for name in order.sample(list(makers), len(makers))
        }
        for name, words in names.items():
            for what in ("trace", "compile"):
                ratio = times[name][what] / times[""][what]
                ratios.setdefault(what + words, []).append(ratio)
    return {what: quartiles(found[1:])._asdict() for what, found in ratios.items()}


def _stages(step: Any) -> dict[str, float]:
    """What JAX takes for a step of which it knows nothing yet, by its stages.

    In seconds of the processor, which other processes take no part of; "compile" is
    lowering and compiling.
    """
    import jax

    arguments = step.arguments()
    jax.clear_caches()
    gc.collect()
    gc.disable()  # It would come in the middle, now on one side and now on the other.
    try:
        start = time.process_time()
        traced = step.step.trace(*arguments)
        middle = time.process_time()
        traced.lower().compile()
        return {"trace": middle - start, "compile": time.process_time() - middle}
    finally:
        gc.enable()
