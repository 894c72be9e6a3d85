"""The suite `cost`: a step with loss scaling over the same step without."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks import BACKENDS
from benchmarks.cost.agreement import Reference
from benchmarks.cost.cases import CASES, case_named
from benchmarks.cost.cost_tables import plot, tables
from benchmarks.cost.peers import PEERS, Peer, Step, Steps, steps_on
from benchmarks.origin import origin
from benchmarks.pairs import CONTROL, is_conclusive, time_in_pairs
from benchmarks.processes import CAN_PIN
from benchmarks.results import Record
from benchmarks.suites import Suite


def measure(
    case: str,
    backend: str,
    peers: Sequence[str],
    seconds: float,
    smallest: bool = False,
    progress: Callable[[float], object] = lambda part: None,
    ready: Callable[[], object] = lambda: None,
) -> Iterator[Record]:
    """Measures a case; Keras must run on `backend`.

    Args:
        case: its name.
        backend: the backend.
        peers: their names. With all of them, those that are slow in this case are left
            out.
        seconds: how long to time, without compilation and checks.
        smallest: whether to take the smallest sizes.
        progress, ready: see `Suite.measure`.

    Yields:
        One record: the ratios of each peer, or why there are none.
    """
    chosen = case_named(case)
    wanted = [
        p
        for p in PEERS
        if p.name in peers
        and backend in p.backends
        # Only Keras users train without jit.
        and (p.family == "keras" or chosen.jit)
    ]
    maker = _Maker(case, steps_on(backend), smallest)
    found: dict[str, Any] = {}
    steps: dict[str, Step] = {}
    left_out = chosen.slow if set(SUITE.peers) <= set(peers) else ()
    for number, peer in enumerate(wanted):
        progress(0.5 * number / len(wanted))
        if peer.name in left_out:
            found[peer.name] = {"slow": f"takes minutes; --peer {peer.name} times it"}
            continue
        found[peer.name], step = maker.checked(peer)
        if step is not None:
            steps[peer.name] = step
    families = dict.fromkeys(p.family for p in wanted if p.name in steps)
    # New ones, made last: on CPUs what a process made first was up to a third faster,
    # and the reference as the base was 5 % slower than its copy.
    unscaled = {f: (maker.unscaled(f), maker.unscaled(f)) for f in families}
    controls = {}
    ready()
    for number, (family, (base, copy)) in enumerate(unscaled.items()):
        mine = {p.name: steps[p.name].run for p in wanted
                if p.family == family and p.name in steps}  # fmt: skip
        timings = time_in_pairs(
            base.run,
            {CONTROL: copy.run, **mine},
            seconds * len(mine) / len(steps),
            progress=functools.partial(_progress_of, progress, number, len(families)),
        )
        control = timings.pop(CONTROL)
        controls[family] = {
            "ratio": control.ratio._asdict(),
            "base_seconds": control.base_seconds._asdict(),
            "conclusive": is_conclusive(control.ratio),
        }
        for name, timing in timings.items():
            found[name] |= {
                "ratio": timing.ratio._asdict(),
                "step_seconds": timing.seconds._asdict(),
            }
    yield {
        "case": case,
        "backend": backend,
        **origin([p.distribution for p in wanted if p.installed]),
        "controls": controls,
        "peers": found,
    }


def _progress_of(
    progress: Callable[[float], object], number: int, families: int, part: float
) -> None:
    # Making and checking the steps is the first half.
    progress(0.5 + 0.5 * (number + part) / families)


class _Maker:
    """Makes the steps of a case."""

    def __init__(self, case: str, steps: Steps, smallest: bool) -> None:
        self._case = case_named(case)
        self._steps = steps
        self._smallest = smallest

    def _made(self, make: Callable[[Any, bool], Step]) -> Step:
        return make(self._case.problem(self._smallest), self._case.jit)

    @functools.cached_property
    def _reference(self) -> Reference:
        return Reference(self._made(self._steps.unscaled["keras"]))

    def unscaled(self, family: str) -> Step:
        """A step without loss scaling that agrees with that of Keras' Adam."""
        step = self._made(self._steps.unscaled[family])
        difference = self._reference.check(step, scaling=False).difference
        if difference:
            raise RuntimeError(f"the {family} step without loss scaling: {difference}")
        return step

    def checked(self, peer: Peer) -> tuple[dict[str, Any], Step | None]:
        """The first entries about a peer, and its step if it can be timed."""
        if not peer.installed:
            return {"missing": f"pip install {peer.distribution}"}, None
        reference = self._reference
        try:
            step = self._made(self._steps.scaled[peer.name])
            check = reference.check(step)
        # Another package, of any version, may raise anything.
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {error}"[:300]}, None
        if check.difference:
            return {"disagrees": check.difference}, None
        return {"first_step_seconds": check.first_step_seconds}, step


SUITE = Suite(
    "cost",
    [
        {"case": case.name, "backend": backend}
        for backend in BACKENDS
        for case in CASES
        if backend in case.backends
    ],
    measure,
    tables,
    plot,
    limit=900.0,  # Some peers compile for more than a minute.
    seconds=5.0,
    peers=tuple(peer.name for peer in PEERS),
    slow=("no-jit-1000", "variables-200-no-jit"),
    pinned=True,
    ahead=CAN_PIN,
)
