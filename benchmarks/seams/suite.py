"""The suite `seams`: what keras_mp costs outside of the optimizer's update.

A layer's call, `import keras_mp`, a step of `fit`, tracing and compiling a step.
"""

import contextlib
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

import keras_mp
from benchmarks import BACKENDS, models
from benchmarks.origin import origin
from benchmarks.pairs import CONTROL, is_conclusive, quartiles, time_in_pairs
from benchmarks.processes import CAN_PIN
from benchmarks.results import Record
from benchmarks.seams.compilation import ROUNDS, compilations
from benchmarks.seams.seams_tables import CASES, tables
from benchmarks.suites import Suite
from keras_mp.backends.train_step import SCALE, monitored
from keras_mp.installing import install, uninstall

CALLS = 200  # of a layer, timed as one step, after the seams are on or off
IMPORTS = 3


def measure(
    case: str,
    backend: str,
    seconds: float = 0.0,
    smallest: bool = False,
    progress: Callable[[float], object] = lambda part: None,
    ready: Callable[[], object] = lambda: None,
) -> Iterator[Record]:
    """Measures a case; Keras must run on `backend`.

    Args:
        case: its name.
        backend: the backend.
        seconds: how long to time pairs.
        smallest: whether to take the smallest sizes, once.
        progress, ready: see `Suite.measure`.

    Yields:
        One record: `ratios` over Keras without keras_mp, for pairs also the `control`
        and whether it is `conclusive`; or `seconds`.
    """
    if case == "layer-call":
        found = _in_pairs(_layer_calls(), seconds, progress, ready)
    elif case == "fit":
        found = _in_pairs(_fits(smallest), seconds, progress, ready)
    elif case == "import":
        times = _imports(1 if smallest else IMPORTS, ready)
        found = {"seconds": {"import keras_mp": times}}
    else:
        ready()
        found = {"ratios": compilations(case, smallest)}
    yield {**origin(), **found}


def _in_pairs(
    runs: dict[str, Callable[[int], None]],
    seconds: float,
    progress: Callable[[float], object],
    ready: Callable[[], object],
) -> dict[str, Any]:
    base = runs.pop("")
    base(1)
    for run in runs.values():
        run(1)
    ready()
    timings = time_in_pairs(base, runs, seconds, progress=progress)
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
    install()
    layer(x)  # The first call, in which the seams choose its policy.

    def calls(number: int) -> None:
        y = x
        for _ in range(CALLS * number):
            y = layer(x)
        keras.ops.convert_to_numpy(y)

    def without(number: int) -> None:
        uninstall()
        try:
            calls(number)
        finally:
            install()

    def with_seams(number: int) -> None:
        # The others switch the seams as well, so both sides pay for that.
        uninstall()
        install()
        calls(number)

    return {"": without, CONTROL: without, "a layer's call": with_seams}


# `fit` ------------------------------------------------------------------------------


def _fits(smallest: bool) -> dict[str, Callable[[int], None]]:
    """Epochs of `fit`, with and without what keras_mp does there.

    All use one model, because its place in memory alone changed a step by a hundredth.
    """
    keras.utils.set_random_seed(0)
    # Enough steps to make what `fit` does once an epoch next to nothing.
    side, steps, batch = (4, 2, 2) if smallest else (32, 20, 16)
    filters, stages = (2, 1) if smallest else (16, 2)
    model = models.convolutions(side, filters, stages, classes=10)
    generator = np.random.default_rng(0)
    x = generator.standard_normal((steps * batch, side, side, 3), dtype="float32")
    y = generator.integers(0, 10, steps * batch)
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.Adam(1e-4))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])

    def fit(
        train_function: Any, with_seams: bool, callbacks: Sequence[Any], epochs: int
    ) -> None:
        uninstall()  # All pay for the change.
        if with_seams:
            install()
        model.train_function = train_function
        monitored.pop(model, None)
        if callbacks:
            monitored[model] = SCALE
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
        fit(None, with_seams, callbacks, 1)
        return functools.partial(fit, model.train_function, with_seams, callbacks)

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


SUITE = Suite(
    "seams",
    # The next case prepares while one is timed, so long ones follow each other.
    [
        {"case": case, "backend": backend}
        for case in CASES
        for backend in BACKENDS
        # Only JAX can trace and compile a step without running it.
        if case not in ROUNDS or backend == "jax"
    ],
    measure,
    tables,
    seconds=4.0,
    slow=tuple(ROUNDS),
    pinned=True,
    ahead=CAN_PIN,
)
