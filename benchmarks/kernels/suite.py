"""The suite `kernels`: what a training step runs on torch, beside `torch.amp`."""

from collections.abc import Callable, Iterator

from benchmarks.kernels.kernels_tables import TITLES, WAYS, tables
from benchmarks.origin import origin
from benchmarks.results import Record
from benchmarks.suites import Suite


def measure(
    case: str,
    backend: str,
    way: str,
    progress: Callable[[float], object] = lambda part: None,
    ready: Callable[[], object] = lambda: None,
) -> Iterator[Record]:
    """Counts a step.

    Args:
        case: one of `TITLES`.
        backend: "torch".
        way: one of `WAYS`.
        progress, ready: see `Suite.measure`.

    Yields:
        A record with the fields of `counting.Count`.
    """
    ready()
    from benchmarks.kernels.steps import CASES, count_step  # It needs torch.

    yield {**origin(), **count_step(CASES[case], way)._asdict()}


SUITE = Suite(
    "kernels",
    [{"case": case, "backend": "torch", "way": way} for case in TITLES for way in WAYS],
    measure,
    tables,
)
