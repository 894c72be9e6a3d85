"""The suite `kernels`: what a training step runs on torch, beside `torch.amp`."""

from collections.abc import Callable, Iterator

from benchmarks.kernels.kernels_tables import AMP, TITLES, WAYS, tables
from benchmarks.origin import origin
from benchmarks.results import Record
from benchmarks.suites import Suite


def measure(
    case: str,
    backend: str,
    way: str,
    seconds: float,
    progress: Callable[[float], object] = lambda part: None,
    ready: Callable[[], object] = lambda: None,
) -> Iterator[Record]:
    """Counts a step, and times it on the host beside torch.amp's.

    Args:
        case: one of `TITLES`.
        backend: "torch".
        way: one of `WAYS`.
        seconds: how long to time it.
        progress, ready: see `Suite.measure`.

    Yields:
        A record with the fields of `counting.Count`, and "host", the `Quartiles` of a
        ratio.
    """
    ready()
    from benchmarks.kernels.steps import CASES, count_step, host_time  # Needs torch.

    found = {**origin(), **count_step(CASES[case], way)._asdict()}
    if CASES[case].narrow and way != AMP:
        found["host"] = host_time(CASES[case], way, seconds)
    yield found


SUITE = Suite(
    "kernels",
    [{"case": case, "backend": "torch", "way": way} for case in TITLES for way in WAYS],
    measure,
    tables,
    seconds=10.0,
)
