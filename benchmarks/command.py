"""What `keras-mp bench` runs: a suite, job by job, with a bar, tables and a picture."""

import contextlib
import functools
import importlib
import importlib.util
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.peers import PEERS
from benchmarks.processes import Job, Process
from benchmarks.results import Results
from keras_mp.display.progress_bar import progress_bar

SHORTEST = 5.0  # seconds: with less left nothing is begun
SUITES = ("cost", "seams", "train", "quality")


def suite_named(name: str) -> Any:
    """The module of a suite.

    It has NAME, NAMES (of its cases; it may have WHEN_NAMED, those that take long),
    ON (backends where it can be measured), IDENTITY (the keys that tell its records
    apart), `jobs`, `tables`, `plot` and `measure`. That is given `tell`, which is told
    how much is done, and `ready`, which it calls before what nothing must disturb.

    Raises:
        ValueError: if there is none of that name.
    """
    _check("suite", [name], SUITES)
    return importlib.import_module(f"benchmarks.{name}")


def bench(
    suite: str = "cost",
    *,
    cases: Sequence[str] | None = None,
    backends: Sequence[str] | None = None,
    peers: Sequence[str] | None = None,
    seconds: float | None = None,
    out: str | None = None,
    resume: bool = False,
    verbose: int = 1,
) -> str:
    """Measures a suite, and writes what comes of it as JSON.

    Args:
        suite: "cost", "seams", "train" or "quality".
        cases: names of cases of the suite; if left out, all but those that take long.
        backends: of Keras; what is installed if left out ("quality": the first).
        peers: whom the suite "cost" measures; all of them if left out.
        seconds: how long to time; each suite knows what it takes otherwise ("train":
            for all of it).
        out: the file, of which records that are not measured now stay;
            `keras_mp_<suite>.json` in the present folder if left out. A picture lies
            beside it where there is one to draw and matplotlib is installed.
        resume: whether what the file holds is left out, as after a run that was cut
            off. What has failed is measured again.
        verbose: 0 for no progress bar.

    Returns:
        The tables, as text.

    Raises:
        ValueError: for a name that there is not, naming those that there are.
    """
    module = suite_named(suite)
    slow = getattr(module, "WHEN_NAMED", ())
    usual = [name for name in module.NAMES if name not in slow]
    cases = usual if cases is None else _check("case", cases, module.NAMES)
    backends = _installed(module, backends)
    peers = _check("peer", peers, [peer.name for peer in PEERS])
    results = Results(out or f"keras_mp_{suite}.json", suite, module.IDENTITY)
    jobs = module.jobs(cases, backends, peers, seconds)
    if not jobs:
        raise ValueError(
            "`case` must be measured on `backend`. Received: "
            f"case={','.join(cases)}, backend={','.join(backends)}, which is not."
        )
    if resume:
        jobs = [job for job in jobs if not _is_done(job, results)]
    with progress_bar(len(jobs), verbose) as tell:
        _run(jobs, results, tell, _budget(module, seconds))
    lines = [table.text() for table in module.tables(results.records)]
    picture = _drawn(module, results)
    lines.append(f"Written: {results.path}{f' and {picture}' if picture else ''}")
    return "\n\n".join(lines)


def _check(
    what: str, names: Sequence[str] | None, there: Sequence[str]
) -> Sequence[str]:
    if names is None:
        return there
    for name in names:
        if name not in there:
            raise ValueError(
                f"`{what}` must be one of {', '.join(there)}. "
                f"Received: {what}={name!r}."
            )
    if not names:
        raise ValueError(f"`{what}` must name at least one. Received: none.")
    return names


def _installed(module: Any, asked: Sequence[str] | None) -> Sequence[str]:
    here = [b for b in module.ON if importlib.util.find_spec(b) is not None]
    told = ", ".join(here) or "nothing"
    for backend in _check("backend", asked, module.ON) if asked is not None else ():
        if backend not in here:
            raise ValueError(
                f"`backend` must be installed; here is {told}. Received: {backend=!r}."
            )
    if not here:
        raise ValueError(
            f"`backend` must be one of {', '.join(module.ON)}, installed. Received: "
            "none, and none of them is."
        )
    return asked or (here[:1] if getattr(module, "ONE_BACKEND", False) else here)


def _is_done(job: Job, results: Results) -> bool:
    found = results.find(job.about)
    return found is not None and "failure" not in found


def _budget(module: Any, seconds: float | None) -> float:
    """How long all the jobs may take together."""
    budget = getattr(module, "BUDGET", None)
    return math.inf if budget is None else seconds or budget


def _run(
    jobs: Sequence[Job],
    results: Results,
    tell: Callable[[str, int, float], None],
    budget: float,
) -> None:
    end = time.monotonic() + budget
    for number, (process, following) in enumerate(_started(jobs)):
        job = process.job
        left = end - time.monotonic()
        if left < SHORTEST:
            return  # What is left is not measured; `resume` goes on with it.
        within = functools.partial(tell, job.title, number)
        within(0)
        limit = min(job.limit, left)
        failure = process.records(limit, results.add, within, following)
        if failure and left >= job.limit:
            # What it has measured before it failed stays beside the failure.
            found = results.find(job.about) or job.about
            results.add({**found, "failure": failure})


def _started(jobs: Sequence[Job]) -> Iterator[tuple[Process, Process | None]]:
    """Processes in turn, each with the next one if that may be under way."""
    with contextlib.ExitStack() as ended:

        def start(number: int) -> Process:
            process = Process(jobs[number], core=-1 - number % 2)
            ended.callback(process.end)
            return process

        following: Process | None = None
        for number in range(len(jobs)):
            process = following or start(number)
            ahead = number + 1 < len(jobs) and jobs[number + 1].ahead
            following = start(number + 1) if ahead else None
            yield process, following


def _drawn(module: Any, results: Results) -> pathlib.Path | None:
    plot = getattr(module, "plot", None)
    if plot is None or importlib.util.find_spec("matplotlib") is None:
        return None
    figure = plot(results.records)
    if figure is None:
        return None
    path = results.path.with_suffix(".png")
    importlib.import_module("keras_mp.display.plots").save_png(figure, path)
    return path
