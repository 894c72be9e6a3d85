"""The suite `train`: whole training steps under each policy, in speed and memory."""

import pathlib
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

import keras_mp
from benchmarks.origin import origin
from benchmarks.pairs import quartiles
from benchmarks.peaks import peak
from benchmarks.processes import Job
from benchmarks.results import Record
from benchmarks.train_cases import TRAIN_CASES, TrainCase
from benchmarks.train_tables import PRECISIONS, plot, tables
from benchmarks.trainers import (
    TRAINERS,
    device_memory,
    forget,
    has_gpu,
    is_out_of_memory,
    set_tf32,
)
from keras_mp.backends import engine

__all__ = ["BUDGET", "IDENTITY", "NAME", "NAMES", "ON", "jobs", "measure", "plot",
           "tables"]  # fmt: skip

NAME = "train"
IDENTITY = ("on", "case", "backend", "precision", "what")
NAMES = tuple(case.name for case in TRAIN_CASES)
ON = ("jax", "torch")
BUDGET = 450.0
"""Seconds for the whole suite; what is left then is not measured."""
LIMITS = {"speed": 120.0, "fits": 150.0}
WARM_UP, STRETCHES, STRETCH = 5, 7, 0.3
"""Steps, stretches, and the seconds of one."""
HALVINGS = 5
TRIES = 4
FRACTION = 0.9  # of the device's memory, that JAX may have


def jobs(
    cases: Sequence[str],
    backends: Sequence[str],
    peers: Sequence[str],
    seconds: float | None,
) -> list[Job]:
    """A process for each configuration: the speed of all, then what fits of all."""
    on = "gpu" if _is_nvidia_here() else "cpu"
    configurations = [
        {"on": on, "case": case.name, "backend": backend, "precision": precision}
        for case in TRAIN_CASES
        for precision in PRECISIONS
        for backend in backends
        if case.name in cases and (on == "gpu" or precision != "tf32")
    ]
    return [
        Job(
            NAME,
            {**configuration, "what": what},
            {},
            limit=LIMITS[what],
            # On CPUs imports would take the time of what is measured.
            ahead=on == "gpu",
            environment={
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                "XLA_PYTHON_CLIENT_MEM_FRACTION": str(FRACTION),
                # The libraries' own switch, beside those of the frameworks.
                **(
                    {"NVIDIA_TF32_OVERRIDE": "0"}
                    if configuration["precision"] == "float32"
                    else {}
                ),
            },
        )
        for what in (("speed", "fits") if on == "gpu" else ("speed",))
        for configuration in configurations
    ]


def _is_nvidia_here() -> bool:
    """Asked before a framework is: it would keep memory of the device."""
    driver = pathlib.Path("/proc/driver/nvidia/version").exists()
    return driver or shutil.which("nvidia-smi") is not None


def measure(
    on: str,
    case: str,
    backend: str,
    precision: str,
    what: str,
    batch: int | None = None,
    tell: Callable[[float], object] = lambda part: None,
    ready: Callable[[], object] = lambda: None,
) -> Iterator[Record]:
    """Measures a configuration; Keras must be running on `backend`.

    Args:
        on: "gpu" or "cpu", which has smaller networks.
        case: its name.
        backend: of it.
        precision: "float32", "tf32", "mixed_float16" or "mixed_bfloat16".
        what: "speed", or "fits": the largest batch.
        batch: its size; that of the case if left out.
        tell: is told how much of it is done, from 0 to 1.
        ready: is called before the device is touched.

    Yields:
        Records, each in the place of the one before.

    Raises:
        RuntimeError: if the framework sees no GPU though there is one.
    """
    ready()
    if on == "gpu" and not has_gpu(backend):
        raise RuntimeError(f"{backend} sees no GPU: install its build with CUDA")
    found = {case.name: case for case in TRAIN_CASES}[case]
    if precision in ("float32", "tf32"):
        set_tf32(backend, precision == "tf32")
    if found.channels_first_on_torch and backend == "torch" and on == "gpu":
        keras.config.set_image_data_format("channels_first")
    setting = _Setting(found, on, backend, precision)
    batch = batch or (found.batch if on == "gpu" else found.small_batch)
    if what == "speed":
        yield _speed(setting, batch, tell)
    else:
        yield from _fits(setting, batch, tell)


class _Setting:
    """A network in a precision, to be built with batches of any size."""

    def __init__(self, case: TrainCase, on: str, backend: str, precision: str) -> None:
        self.case, self.backend, self.precision = case, backend, precision
        self.sizes = case.sizes if on == "gpu" else case.small_sizes

    def trainer(self, batch: int) -> tuple[Any, float]:
        """(a trainer, operations of the forward pass for one example)."""
        keras.utils.set_random_seed(0)
        policy = "float32" if self.precision == "tf32" else self.precision
        with keras_mp.policy_scope(policy):
            model, operations = self.case.make(**self.sizes)
            model.compile(keras.optimizers.Adam(1e-5), self.case.loss())
            data = self.case.data(batch, **self.sizes)
            return TRAINERS[self.backend](model, *data), operations


def _speed(setting: _Setting, batch: int, tell: Callable[[float], object]) -> Record:
    """With half the batch, and half of that, where the device has too little memory."""
    for _ in range(HALVINGS):
        try:
            return _speed_at(setting, batch, tell)
        except Exception as error:
            if not is_out_of_memory(error) or batch == 1:
                raise
        forget(setting.backend)
        batch //= 2
    raise RuntimeError(f"not even a batch of {2 * batch} fits")


def _speed_at(setting: _Setting, batch: int, tell: Callable[[float], object]) -> Record:
    read_memory = engine.measure_memory()
    trainer, operations = setting.trainer(batch)
    tell(0.2)
    start = time.perf_counter()
    trainer.run(1)
    first = time.perf_counter() - start
    tell(0.7)
    trainer.run(WARM_UP)
    start = time.perf_counter()
    trainer.run(1)
    steps = max(1, round(STRETCH / (time.perf_counter() - start)))
    times = []
    for number in range(STRETCHES):
        start = time.perf_counter()
        trainer.run(steps)
        times.append((time.perf_counter() - start) / steps)
        tell(0.7 + 0.3 * number / STRETCHES)
    told = origin()
    # Forward once, backward twice.
    rate = 3 * operations * batch / statistics.median(times)
    most = peak(told["device"], setting.precision)
    return {
        **told,
        "batch": batch,
        "step_seconds": quartiles(times)._asdict(),
        "examples_per_second": quartiles([batch / t for t in times])._asdict(),
        "first_step_seconds": first,
        "peak_bytes": read_memory(),
        "resident_bytes": trainer.resident_bytes,
        "operations_per_second": rate,
        "share_of_peak": None if most is None else rate / most,
        "skipped_steps": trainer.skipped_steps,
    }


def _fits(
    setting: _Setting, batch: int, tell: Callable[[float], object]
) -> Iterator[Record]:
    """The largest batch that has been run, and the smallest that was too large.

    What a batch takes grows with its size: the first one tells where to look.
    """
    needed = None
    fits, too_large = 0, None
    for number in range(TRIES):
        tell(number / TRIES)
        read_memory = engine.measure_memory()
        trainer = None
        try:
            trainer, _ = setting.trainer(batch)
            trainer.run(2)
            fits = max(fits, batch)
            if needed is None:
                needed = _bytes_per_example(trainer, read_memory(), batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            too_large = min(batch, too_large or batch)
            # The traceback holds what has to be given back.
            error.__traceback__ = None
        trainer = None
        forget(setting.backend)
        yield {**origin(), "largest_batch": fits, "too_large": too_large}
        following = _next_batch(batch, fits, too_large, needed if not number else None)
        if following in (fits, too_large, 0):
            return
        batch = following


def _bytes_per_example(
    trainer: Any, peak_bytes: int | None, batch: int
) -> tuple[int, float] | None:
    if peak_bytes is None or peak_bytes <= trainer.resident_bytes:
        return None
    resident = trainer.resident_bytes
    return resident, (peak_bytes - resident) / batch


def _next_batch(
    batch: int,
    fits: int,
    too_large: int | None,
    needed: tuple[int, float] | None,
) -> int:
    if needed is not None:
        room = device_memory(keras.backend.backend())
        if room is not None:
            resident, each = needed
            return max(fits, _rounded((room - resident) / each * 0.97))
    if too_large is None:
        return _rounded(fits * 1.15)
    if not fits:
        return batch // 2
    return _rounded((fits + too_large) / 2)


def _rounded(batch: float) -> int:
    """Down to a multiple of 8, which tensor cores like, if it is more than that."""
    return int(batch) // 8 * 8 if batch >= 64 else int(batch)
