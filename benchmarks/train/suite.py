"""The suite `train`: speed and memory of whole training steps under each policy."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

import keras_mp
from benchmarks.origin import origin
from benchmarks.pairs import quartiles
from benchmarks.results import Record
from benchmarks.suites import Suite
from benchmarks.train.cases import TRAIN_CASES, TrainCase
from benchmarks.train.device import (
    device_memory,
    forget,
    has_gpu,
    is_nvidia_here,
    is_out_of_memory,
    peak,
    set_tf32,
)
from benchmarks.train.train_tables import (
    FLOAT32,
    IN_SHORT,
    KERAS,
    PRECISIONS,
    TORCH_AMP,
    glance,
    is_measured,
    plot,
    tables,
)
from benchmarks.train.trainers import TRAINERS
from keras_mp.backends import engine

ON = "gpu" if is_nvidia_here() else "cpu"
WARM_UP, STRETCHES, STRETCH = 5, 7, 0.3
"""Steps before the timing; timed stretches; the seconds of each."""
HALVINGS = 5
TRIES = 4
FRACTION = 0.9  # of the device's memory, for JAX


def measure(
    on: str,
    case: str,
    backend: str,
    precision: str,
    what: str,
    batch: int | None = None,
    progress: Callable[[float], object] = lambda part: None,
    ready: Callable[[], object] = lambda: None,
) -> Iterator[Record]:
    """Measures a configuration; Keras must run on `backend`.

    Args:
        on: "gpu" or "cpu", with smaller networks.
        case: the name of the network.
        backend: the backend.
        precision: one of `PRECISIONS`.
        what: "speed" or "fits", the largest batch.
        batch: its size; the case's if left out.
        progress, ready: see `Suite.measure`.

    Yields:
        Records, each in place of the one before.

    Raises:
        RuntimeError: if the framework sees no GPU though there is one.
    """
    ready()
    if on == "gpu" and not has_gpu():
        raise RuntimeError(f"{backend} sees no GPU: install its build with CUDA")
    found = {case.name: case for case in TRAIN_CASES}[case]
    if precision in FLOAT32:
        set_tf32(backend, precision == "tf32")
    setting = _Setting(found, on, backend, precision)
    batch = batch or (found.batch if on == "gpu" else found.small_batch)
    if what == "speed":
        yield _speed(setting, batch, progress)
    else:
        yield from _fits(setting, batch, progress)


class _Setting:
    """A network in a precision, for batches of any size."""

    def __init__(self, case: TrainCase, on: str, backend: str, precision: str) -> None:
        self.case, self.backend, self.precision = case, backend, precision
        self.sizes = case.sizes if on == "gpu" else case.small_sizes

    def trainer(self, batch: int) -> tuple[Any, float | None]:
        """A trainer, and the operations of the forward pass for one example, if known.

        For plain Keras it removes the seams, and leaves them out.
        """
        keras.utils.set_random_seed(0)
        data = self.case.data(batch, **self.sizes)
        if self.precision == TORCH_AMP:
            from benchmarks.train.peers import NETWORKS, AmpTrainer

            with keras.device("cpu"):
                _, operations = self.case.make(**self.sizes)
            return AmpTrainer(NETWORKS[self.case.name](**self.sizes), *data), operations
        if self.precision in (*FLOAT32, KERAS):
            keras_mp.uninstall()
        keras.config.set_dtype_policy(self._policy())
        model, operations = self.case.make(**self.sizes)
        model.compile(keras.optimizers.Adam(1e-5), self.case.loss())
        return TRAINERS[self.backend](model, *data), operations

    def _policy(self) -> Any:
        if self.precision in FLOAT32:
            return keras.DTypePolicy("float32")
        if self.precision == KERAS:
            return keras.DTypePolicy("mixed_float16")
        return keras_mp.Policy(self.precision)


def _speed(
    setting: _Setting, batch: int, progress: Callable[[float], object]
) -> Record:
    """The speed; with half the batch, or a quarter, if the memory is too small."""
    for _ in range(HALVINGS):
        try:
            return _speed_at(setting, batch, progress)
        except Exception as error:
            if not is_out_of_memory(error) or batch == 1:
                raise
        forget(setting.backend)
        batch //= 2
    raise RuntimeError(f"not even a batch of {2 * batch} fits")


def _speed_at(
    setting: _Setting, batch: int, progress: Callable[[float], object]
) -> Record:
    read_memory = engine.measure_memory()
    trainer, operations = setting.trainer(batch)
    progress(0.2)
    start = time.perf_counter()
    trainer.run(1)
    first = time.perf_counter() - start
    progress(0.7)
    trainer.run(WARM_UP + trainer.first_steps)
    start = time.perf_counter()
    trainer.run(1)
    steps = max(1, round(STRETCH / (time.perf_counter() - start)))
    times = []
    for number in range(STRETCHES):
        start = time.perf_counter()
        trainer.run(steps)
        times.append((time.perf_counter() - start) / steps)
        progress(0.7 + 0.3 * number / STRETCHES)
    where = origin()
    # Forward once, backward twice.
    rate = operations and 3 * operations * batch / statistics.median(times)
    most = peak(where["device"], setting.precision)
    return {
        **where,
        "batch": batch,
        "step_seconds": quartiles(times)._asdict(),
        "examples_per_second": quartiles([batch / t for t in times])._asdict(),
        "first_step_seconds": first,
        "peak_bytes": read_memory(),
        "resident_bytes": trainer.resident_bytes,
        "operations_per_second": rate,
        "share_of_peak": None if most is None or rate is None else rate / most,
        "skipped_steps": trainer.skipped_steps,
    }


def _fits(
    setting: _Setting, batch: int, progress: Callable[[float], object]
) -> Iterator[Record]:
    """The largest batch that ran, and the smallest that was too large.

    Memory grows with the batch: the first one shows where to look.
    """
    needed = None
    fits, too_large = 0, None
    for number in range(TRIES):
        progress(number / TRIES)
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
            # The traceback keeps the tensors alive.
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
    """Rounded down to a multiple of 8, for the tensor cores, from 64 on."""
    return int(batch) // 8 * 8 if batch >= 64 else int(batch)


def _environment(about: Mapping[str, str]) -> dict[str, str]:
    variables = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": str(FRACTION),
    }
    if about["precision"] == "float32":
        # The switch of NVIDIA's libraries, in addition to those of the frameworks.
        variables["NVIDIA_TF32_OVERRIDE"] = "0"
    return variables


SUITE = Suite(
    "train",
    # First the speed of all, then the largest batches.
    [
        {"on": ON, "case": case.name, "backend": backend, "precision": precision,
         "what": what}
        for what in (("speed", "fits") if ON == "gpu" else ("speed",))
        for case in TRAIN_CASES
        for precision in PRECISIONS
        for backend in ("jax", "torch")
        if is_measured(case, ON, backend, precision)
    ],
    measure,
    tables,
    plot,
    limit=150.0,
    budget=450.0,
    # On CPUs the imports of the next process would disturb the timing.
    ahead=ON == "gpu",
    in_short=IN_SHORT,
    glance=glance,
    environment=_environment,
)  # fmt: skip
