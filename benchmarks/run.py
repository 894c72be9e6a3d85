"""Runs a suite: job by job, with a progress bar, tables and a picture."""

import contextlib
import functools
import importlib
import importlib.util
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from benchmarks.processes import Job, Process
from benchmarks.results import Results
from benchmarks.suites import Suite, check_names, jobs, suite_named
from keras_mp.tools.display.progress_bar import progress_bar

SHORTEST = 5.0  # seconds: with less time left, no job starts


class Plan(NamedTuple):
    """What a run measures.

    Attributes:
        suite: whose jobs they are.
        jobs: in order.
        results: the file that takes the records.
        budget: seconds for all jobs together.
    """

    suite: Suite
    jobs: list[Job]
    results: Results
    budget: float


def plan(
    suite: str = "cost",
    *,
    cases: Sequence[str] | None = None,
    backends: Sequence[str] | None = None,
    peers: Sequence[str] | None = None,
    seconds: float | None = None,
    out: str | None = None,
    resume: bool = False,
) -> Plan:
    """What to measure in a suite.

    Args:
        suite: "cost", "seams", "train" or "quality".
        cases: names of its cases; by default all but the slow ones.
        backends: those of Keras; by default the installed ones ("quality": the first).
        peers: the packages that "cost" compares; by default all.
        seconds: how long to time a case ("train": all of it), if not the usual time.
        out: the file, which keeps records that are not measured now; by default
            `keras_mp_<suite>.json` in the current folder. The picture goes beside it if
            there is one to draw and matplotlib is installed.
        resume: whether to leave out what the file has already, as after a run that was
            cut off. What has failed is measured again.

    Raises:
        ValueError: for an unknown name; the message has the known ones.
    """
    if seconds is not None and not seconds > 0:
        raise ValueError(f"`seconds` must be more than 0. Received: {seconds=}.")
    found = suite_named(suite)
    known = found.values("case")
    usual = [name for name in known if name not in found.slow]
    cases = usual if cases is None else check_names("case", cases, known)
    backends = _installed(found, backends)
    if peers is not None and not found.peers:
        raise ValueError(
            f"`peer` must be left out of the suite {suite!r}, which compares no "
            f"packages. Received: peer={','.join(peers)!r}."
        )
    peers = found.peers if peers is None else check_names("peer", peers, found.peers)
    results = Results(out or f"keras_mp_{suite}.json", found.name, found.identity)
    all_jobs = jobs(found, cases, backends, peers, seconds)
    if not all_jobs:
        raise ValueError(
            "`case` must be one that runs on `backend`. Received: "
            f"case={','.join(cases)}, backend={','.join(backends)}."
        )
    if resume:
        all_jobs = [job for job in all_jobs if not _is_done(job, results)]
    limited = math.isfinite(found.budget)
    budget = seconds or found.budget if limited else math.inf
    return Plan(found, all_jobs, results, budget)


def measure(plan: Plan, verbose: int = 1) -> str:
    """Runs the jobs of a plan and writes each record as soon as it is there.

    Args:
        plan: what to measure.
        verbose: 0 for no progress bar.

    Returns:
        The tables, as text.
    """
    with progress_bar(len(plan.jobs), verbose) as progress:
        _run(plan, progress)
    parts = [table.text() for table in plan.suite.tables(plan.results.records)]
    picture = _draw(plan)
    parts.append(f"Written: {plan.results.path}{f' and {picture}' if picture else ''}")
    return "\n\n".join(parts)


def _installed(suite: Suite, asked: Sequence[str] | None) -> Sequence[str]:
    known = suite.values("backend")
    installed = [b for b in known if importlib.util.find_spec(b) is not None]
    if not installed:
        raise ValueError(
            f"`backend` must be one of {', '.join(known)}, and installed. None of them "
            "is: pip install jax"
        )
    if asked is None:
        return installed[:1] if suite.one_backend else installed
    for backend in check_names("backend", asked, known):
        if backend not in installed:
            raise ValueError(
                f"`backend` must be installed, as {', '.join(installed)} here. "
                f"Received: {backend=!r}."
            )
    return asked


def _is_done(job: Job, results: Results) -> bool:
    found = results.find(job.about)
    return found is not None and "failure" not in found


def _run(plan: Plan, progress: Callable[[str, int, float], None]) -> None:
    end = time.monotonic() + plan.budget
    for number, (process, following) in enumerate(_started(plan.jobs)):
        job = process.job
        left = end - time.monotonic()
        if left < SHORTEST:
            return  # A run with `resume` measures the rest.
        job_progress = functools.partial(progress, job.title, number)
        job_progress(0)
        limit = min(job.limit, left)
        failure = process.records(limit, plan.results.add, job_progress, following)
        if failure and left >= job.limit:
            # What it measured before it failed stays beside the failure.
            found = plan.results.find(job.about) or job.about
            plan.results.add({**found, "failure": failure})


def _started(jobs: Sequence[Job]) -> Iterator[tuple[Process, Process | None]]:
    """The processes in turn, each with the next one if that runs already."""
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


def _draw(plan: Plan) -> pathlib.Path | None:
    """Draws the picture, if there is one; returns its path."""
    if plan.suite.plot is None or importlib.util.find_spec("matplotlib") is None:
        return None
    figure = plan.suite.plot(plan.results.records)
    if figure is None:
        return None
    path = plan.results.path.with_suffix(".png")
    importlib.import_module("keras_mp.tools.display.plots").save_png(figure, path)
    return path
