"""What a suite is, and the jobs that it makes."""

import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import SUITES
from benchmarks.processes import Job
from benchmarks.results import Record
from keras_mp.tables import Table

NOT_MEASURED = "not measured"


@dataclasses.dataclass(frozen=True)
class Suite:
    """A suite: what it can measure, and how.

    Attributes:
        name: of the suite, and of its folder.
        configurations: all that it can measure, in order. Each tells its record from
            the others; "case" and "backend" are part of it.
        measure: takes a configuration, the options and two functions, and yields
            records, each in place of the one before. It calls `progress` with the
            share that is done, from 0 to 1, and `ready` before the part that nothing
            may disturb.
        tables: (records, whole) -> tables; with `whole` they have a row for what is
            not measured, too.
        plot: records -> a matplotlib figure, or None if there is nothing to draw.
        limit: a process ends after this many seconds.
        seconds: how long to time a case, if `measure` takes that.
        budget: seconds for all processes together.
        peers: names of the packages to compare, if `measure` takes them.
        slow: cases that take long: measured only if they are named.
        in_short: the cases that the pages of the documentation show.
        glance: records -> the table that README shows, and the records that it used.
        one_backend: whether to take only one backend if none is named.
        pinned: whether a process has one core, while nothing else of ours runs.
        ahead: whether a process starts while the one before runs.
        environment: configuration -> environment variables of its process.
    """

    name: str
    configurations: Sequence[Mapping[str, str]]
    measure: Callable[..., Iterator[Record]]
    tables: Callable[..., list[Table]]
    plot: Callable[[Sequence[Record]], Any] | None = None
    limit: float = 600.0
    seconds: float | None = None
    budget: float = math.inf
    peers: Sequence[str] = ()
    slow: Sequence[str] = ()
    in_short: Sequence[str] = ()
    glance: Callable[[Sequence[Record]], tuple[Table, list[Record]]] | None = None
    one_backend: bool = False
    pinned: bool = False
    ahead: bool = False
    environment: Callable[[Mapping[str, str]], dict[str, str]] = lambda about: {}

    @property
    def identity(self) -> tuple[str, ...]:
        """The keys that tell its records apart."""
        return tuple(self.configurations[0])

    def values(self, key: str) -> list[str]:
        """All values of a key of its configurations."""
        return list(dict.fromkeys(about[key] for about in self.configurations))


def without_empty(
    columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """The columns of a table that have a text in some row, and its rows with these."""
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    return [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]


def suite_named(name: str) -> Suite:
    """The suite of that name.

    Raises:
        ValueError: if there is none.
    """
    check_names("suite", [name], SUITES)
    return importlib.import_module(f"benchmarks.{name}.suite").SUITE


def jobs(
    suite: Suite,
    cases: Sequence[str],
    backends: Sequence[str],
    peers: Sequence[str],
    seconds: float | None,
) -> list[Job]:
    """A process for each configuration of these cases and backends."""
    options: dict[str, Any] = {}
    if suite.peers:
        options["peers"] = list(peers)
    if suite.seconds:
        options["seconds"] = seconds or suite.seconds
    return [
        Job(
            suite.name,
            dict(about),
            options,
            limit=suite.limit,
            ahead=suite.ahead,
            pinned=suite.pinned,
            environment=suite.environment(about),
        )
        for about in suite.configurations
        if about["case"] in cases and about["backend"] in backends
    ]


def check_names(
    argument: str, names: Sequence[str], known: Sequence[str]
) -> Sequence[str]:
    """The names, if all are known; else a ValueError with the known ones."""
    if not names:
        raise ValueError(f"`{argument}` must name at least one. Received: none.")
    for name in names:
        if name not in known:
            raise ValueError(
                f"`{argument}` must be one of {', '.join(known)}. "
                f"Received: {argument}={name!r}."
            )
    return names
