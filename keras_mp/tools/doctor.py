"""`keras-mp doctor`: the devices, what they are fast in, and what `"auto"` picks."""

import pathlib
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_mp.backends import engine
from keras_mp.errors import missing_package, version_of
from keras_mp.policies.hardware import Recommendation, recommended_policy
from keras_mp.tables import Table

DTYPES = ("float32", "float16", "bfloat16")
SECONDS = 1.0  # For all products together, without compiling them.
SIDE, SIDE_ON_CPUS = 4096, 512
_DRIVER = pathlib.Path("/proc/driver/nvidia/version")


class Product(NamedTuple):
    """How long a matrix product takes in a dtype."""

    dtype: str  # Both matrices and the result have it.
    seconds: float | None = None  # The median.
    # The median of float32 divided by this one.
    speedup: float | None = None
    # The middle half of float32's times divided by this dtype's, timed in succession.
    quartiles: tuple[float, float] | None = None
    failure: str = ""  # The error, if there was one.

    @property
    def verdict(self) -> str:
        """The speedup with its spread; unclear where noise may have made it."""
        if self.speedup is None or self.quartiles is None or self.dtype == "float32":
            return f"{self.speedup:.2f}" if self.speedup else ""
        low, high = self.quartiles
        low, high = min(low, self.speedup), max(high, self.speedup)
        what = "unclear" if low <= 1 <= high else f"{self.speedup:.2f}"
        return f"{what} ({low:.2f} to {high:.2f})"


class Examination(NamedTuple):
    """What `examine` has found; prints as a table."""

    versions: dict[str, str]  # Python's and each package's.
    driver: str  # The version of the NVIDIA driver; empty if there is none.
    recommended: Recommendation
    side: int  # Rows of the square matrices that were multiplied.
    products: tuple[Product, ...]  # One for each dtype.
    missing: tuple[str, ...]  # What is not installed, and what to do about it.

    def __str__(self) -> str:
        rows = [
            (
                p.dtype,
                f"{1000 * p.seconds:.3g} ms" if p.seconds else p.failure,
                p.verdict,
            )
            for p in self.products
        ]
        return Table(
            ("dtype", "a product takes", "times as fast as float32"),
            rows,
            self._heading(),
            ["In brackets: the middle half of the runs. It tells noise from speed."]
            + [f"auto: {self.recommended.name}. {self.recommended.reason}"]
            + [f"- {line}" for line in self.missing],
        ).text()

    def _heading(self) -> str:
        lines = [", ".join(f"{n} {v}" for n, v in self.versions.items())]
        for device in self.recommended.devices:
            kind = device.kind
            if device.compute_capability:
                major, minor = device.compute_capability
                kind += f", compute capability {major}.{minor}"
            lines.append(f"device: {device.name} ({kind})")
        if not self.recommended.devices:
            lines.append("device: none could be listed")
        lines.append(f"NVIDIA driver: {self.driver or 'none'}")
        lines.append(f"matrix products, {self.side} x {self.side}:")
        return "\n".join(lines)


def examine(seconds: float = SECONDS) -> Examination:
    """Looks at the backend and its devices, and times products for `seconds`.

    It reports a broken driver instead of raising.
    """
    recommended = recommended_policy()
    accelerators = [d for d in recommended.devices if d.kind != "cpu"]
    side = SIDE if accelerators else SIDE_ON_CPUS
    driver = _driver()
    packages = ("keras_mp", "keras", keras.backend.backend())
    return Examination(
        versions={
            "Python": platform.python_version(),
            **{name: version_of(name) for name in packages},
        },
        driver=driver,
        recommended=recommended,
        side=side,
        products=times_of_products(side, seconds),
        missing=tuple(_missing(driver, bool(accelerators))),
    )


def times_of_products(side: int, seconds: float) -> tuple[Product, ...]:
    """Times square matrix products, the dtypes in turn, until the seconds have passed.

    Each product is timed at least three times.
    """
    runs: dict[str, Callable[[], float]] = {}
    products: dict[str, Product] = {}
    for dtype in DTYPES:
        try:
            run = _timed_product(side, dtype)
            run()  # Compiles it.
            runs[dtype] = run
        except Exception as error:  # A driver or a compiler may raise anything.
            failure = f"{type(error).__name__}: {' '.join(str(error).split())}"
            products[dtype] = Product(dtype, failure=failure[:60])
    times: dict[str, list[float]] = {dtype: [] for dtype in runs}
    end = time.perf_counter() + seconds
    while runs and (time.perf_counter() < end or min(map(len, times.values())) < 3):
        for dtype, run in runs.items():
            times[dtype].append(run())
    for dtype, own in times.items():
        pairs = zip(times.get("float32", []), own, strict=False)
        ratios = [wide_time / own_time for wide_time, own_time in pairs]
        median, speedup, quartiles = statistics.median(own), None, None
        if ratios:
            speedup = statistics.median(times["float32"]) / median
            low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
            quartiles = low, high
        products[dtype] = Product(dtype, median, speedup, quartiles)
    return tuple(products[dtype] for dtype in DTYPES)


def _timed_product(side: int, dtype: str) -> Callable[[], float]:
    random = np.random.default_rng(0)
    a, b = (ops.cast(random.standard_normal((side, side)), dtype) for _ in range(2))
    # Reading one number waits for the product and copies nothing else.
    product = engine.compiled(lambda a, b: ops.max(ops.matmul(a, b)))

    def run() -> float:
        start = time.perf_counter()
        float(ops.convert_to_numpy(ops.cast(product(a, b), "float32")))
        return time.perf_counter() - start

    return run


def _driver() -> str:
    try:
        text = _DRIVER.read_text()
    except OSError:
        return ""
    version = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return version[0] if version else "of unknown version"


def _missing(driver: str, accelerated: bool) -> Iterator[str]:
    if driver and not accelerated:
        yield (
            f"There is an NVIDIA driver, but {keras.backend.backend()} sees no GPU: "
            "install its build with CUDA."
        )
    if not driver and not accelerated:
        yield (
            "No GPU found. You can test mixed precision here, but expect no speed-up."
        )
    if find_spec("matplotlib") is None:
        yield str(missing_package("Drawing", "matplotlib"))
