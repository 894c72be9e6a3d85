"""The tables of the suite `quality`."""

import math
import statistics
from collections.abc import Sequence

from benchmarks import BACKENDS
from benchmarks.quality.tasks import TASKS, Task
from benchmarks.results import Record
from benchmarks.suites import NOT_MEASURED
from keras_mp.tables import Table
from keras_mp.tools.comparison.judgement import DIFFERS, difference

UNSCALED, SLOTS, KERAS = "unscaled", "bfloat16 slots", "Keras' "
_WAYS = ("float32", "mixed_float16", "mixed_bfloat16", "bfloat16", SLOTS, UNSCALED)
_TITLES = {UNSCALED: "float16, not scaled"}
_COLUMNS = ("", "trained in", "ends with", "difference to float32 (95 %)", "skipped")


def ways(task: Task) -> list[str]:
    """The policies that a task is trained under, and its controls."""
    return [*_WAYS, *(f"{KERAS}{policy}" for policy in task.controls)]


def tables(records: Sequence[Record], whole: bool = False) -> list[Table]:
    """A table for each backend.

    Args:
        records: of the suite.
        whole: whether trainings without a record have a row that says so. Without any
            record, that is a table for JAX.
    """
    measured = [b for b in BACKENDS if any(r["backend"] == b for r in records)]
    return [
        _table(backend, records, whole)
        for backend in measured or (BACKENDS[:1] if whole else ())
    ]


def _table(backend: str, records: Sequence[Record], whole: bool) -> Table:
    mine = {(r["case"], r["way"]): r for r in records if r["backend"] == backend}
    rows = []
    for task in TASKS:
        title = f"{task.title} ({task.metric[1]})"
        base = mine.get((task.name, "float32"), {})
        for way in ways(task):
            record = mine.get((task.name, way))
            if record is None and not whole:
                continue
            name = _TITLES.get(way, way)
            rows.append((title, name, *_cells(task, record, base)))
            title = ""
    seeds = max((len(r.get("values", [])) for r in mine.values()), default=0)
    failed = [
        f"{r['case']}, {r['way']}: {r['failure']}"
        for r in mine.values()
        if "failure" in r
    ]
    title = f"{backend}, {seeds} seeds" if seeds else backend
    return Table(_COLUMNS, rows, title=title, notes=failed)


def _cells(task: Task, record: Record | None, base: Record) -> tuple[str, str, str]:
    if record is None:
        return NOT_MEASURED, "", ""
    if not record.get("values"):
        return "failed", "", ""
    values = record["values"]
    finite = [v for v in values if v is not None and math.isfinite(v)]
    lost = len(values) - len(finite)
    mean = statistics.fmean(finite) if finite else 0.0
    ends = _number(task, mean, mean) if finite else ""
    if lost:
        ends = f"{ends}{'; ' if ends else ''}{lost} of {len(values)} not finite"
    skipped = [s for s in record["skipped_steps"] if s is not None]
    counts = f"{min(skipped)} to {max(skipped)}" if skipped else ""
    others = base.get("values", [])
    if record is base or lost or None in others or len(values) != len(others):
        return ends, "", counts
    found = difference(others, values)
    if found.half_width is None:
        return ends, "", counts
    off, half = (_number(task, x, mean) for x in (found.mean, found.half_width))
    verdict = f", {DIFFERS}" if found.verdict == DIFFERS else ""
    return ends, f"{'' if found.mean < 0 else '+'}{off} ± {half}{verdict}", counts


def _number(task: Task, value: float, like: float) -> str:
    """The value with the digits that a number as large as `like` has."""
    if task.metric[0] == "accuracy":
        return f"{100 * value:.2f} %"
    return f"{value:.0f}" if abs(like) >= 100 else f"{value:.4f}"
