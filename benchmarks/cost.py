"""The suite `cost`: a step with loss scaling over the same step without."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.cases import BACKENDS, CASES, case_named
from benchmarks.cost_tables import plot, tables
from benchmarks.origin import origin
from benchmarks.pairs import CONTROL, is_conclusive, time_in_pairs
from benchmarks.peers import PEERS, Peer
from benchmarks.processes import CAN_PIN, Job
from benchmarks.results import Record
from benchmarks.same_steps import Reference
from benchmarks.steps import Engine, Step, engine

__all__ = ["IDENTITY", "NAME", "NAMES", "ON", "jobs", "measure", "plot", "tables"]

NAME = "cost"
IDENTITY = ("case", "backend")
NAMES = tuple(case.name for case in CASES)
WHEN_NAMED = ("no-jit-1000", "variables-200-no-jit")
NAMES_OF_PEERS = tuple(peer.name for peer in PEERS)
ON = BACKENDS
SECONDS = 5.0  # to time a case, compilation and checks aside
LIMIT = 900.0  # for all of a case: some peers compile for more than a minute


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
            {"case": case.name, "backend": backend},
            {"peers": list(peers), "seconds": seconds or SECONDS},
            limit=LIMIT,
            ahead=CAN_PIN,
            pinned=True,
        )
        for backend in backends
        for case in CASES
        if case.name in cases and backend in case.backends
    ]


def measure(
    case: str,
    backend: str,
    peers: Sequence[str],
    seconds: float = SECONDS,
    smallest: bool = False,
    tell: Callable[[float], object] = lambda part: None,
    ready: Callable[[], object] = lambda: None,
) -> Iterator[Record]:
    """Measures a case; Keras must be running on `backend`.

    Args:
        case: its name.
        backend: of it.
        peers: their names. Where they are all, those that are slow in this case are
            left out.
        seconds: for the timing.
        smallest: whether to take the smallest sizes.
        tell: is told how much of it is done, from 0 to 1.
        ready: is called before the timing.

    Yields:
        One record: of each peer the ratios, or why there are none.
    """
    wanted = [
        p
        for p in PEERS
        if p.name in peers
        and backend in p.backends
        # Only Keras' users go without jit.
        and (p.family == "keras" or case_named(case).jit)
    ]
    bench = _Bench(case, engine(backend), smallest)
    found: dict[str, Any] = {}
    steps: dict[str, Step] = {}
    left_out = case_named(case).slow if set(NAMES_OF_PEERS) <= set(peers) else ()
    for number, peer in enumerate(wanted):
        tell(0.5 * number / len(wanted))
        if peer.name in left_out:
            found[peer.name] = {"slow": f"takes minutes; --peer {peer.name} times it"}
            continue
        found[peer.name], step = bench.checked(peer)
        if step is not None:
            steps[peer.name] = step
    families = dict.fromkeys(p.family for p in wanted if p.name in steps)
    # Made last, and of these alone: on CPUs what a process makes first was up to a
    # third faster, and the reference, timed as the base, 5 % slower than a copy of it.
    unscaled = {f: (bench.unscaled(f), bench.unscaled(f)) for f in families}
    controls = {}
    ready()
    for number, (family, (base, again)) in enumerate(unscaled.items()):
        mine = {p.name: steps[p.name].run for p in wanted
                if p.family == family and p.name in steps}  # fmt: skip
        timings = time_in_pairs(
            base.run,
            {CONTROL: again.run, **mine},
            seconds * len(mine) / len(steps),
            tell=functools.partial(_tell_of, tell, number, len(families)),
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


def _tell_of(
    tell: Callable[[float], object], number: int, families: int, part: float
) -> None:
    # The other half was making and checking the steps.
    tell(0.5 + 0.5 * (number + part) / families)


class _Bench:
    """The steps of a case."""

    def __init__(self, case: str, engine: Engine, smallest: bool) -> None:
        self._case = case_named(case)
        self._engine = engine
        self._smallest = smallest

    def _made(self, make: Callable[[Any, bool], Step]) -> Step:
        return make(self._case.problem(self._smallest), self._case.jit)

    @functools.cached_property
    def _reference(self) -> Reference:
        return Reference(self._made(self._engine.unscaled["keras"]))

    def unscaled(self, family: str) -> Step:
        """A step without loss scaling that agrees with that of Keras' Adam."""
        step = self._made(self._engine.unscaled[family])
        complaint = self._reference.check(step, scaling=False).complaint
        if complaint:
            raise RuntimeError(f"the {family} step without loss scaling: {complaint}")
        return step

    def checked(self, peer: Peer) -> tuple[dict[str, Any], Step | None]:
        """(what there is to say of a peer, its step if it can be timed)."""
        if not peer.installed:
            return {"missing": f"pip install {peer.distribution}"}, None
        reference = self._reference
        try:
            step = self._made(self._engine.scaled[peer.name])
            check = reference.check(step)
        # Other people's code, of whatever version is here.
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {error}"[:300]}, None
        if check.complaint:
            return {"disagrees": check.complaint}, None
        return {"first_step_seconds": check.first_step_seconds}, step
