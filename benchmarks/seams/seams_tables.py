"""The table of the suite `seams`."""

from collections.abc import Sequence

from benchmarks import BACKENDS
from benchmarks.results import Record
from benchmarks.suites import NOT_MEASURED
from keras_mp.tables import Table

CASES = {
    "layer-call": "a layer's call outside jit",
    "fit": "a step of fit",
    "import": "import keras_mp, after keras",
    "compile-10": "a jitted step, 10 variables",
    "compile-100": "a jitted step, 100 variables",
    "compile-1000": "a jitted step, 1000 variables",
}
_COLUMNS = ("", "backend", "of it", "median", "quartiles")


def tables(records: Sequence[Record], whole: bool = False) -> list[Table]:
    """One table, of ratios and of milliseconds.

    Args:
        records: of the suite.
        whole: whether cases without a record have a row that says so.
    """
    rows = []
    for case, title in CASES.items():
        found = [r for r in records if r["case"] == case]
        found.sort(key=lambda record: BACKENDS.index(record["backend"]))
        for record in found:
            rows += [(title, record["backend"], *cells) for cells in _cells(record)]
        if whole and not found:
            rows.append((title, "", "", NOT_MEASURED, ""))
    notes = []
    if any(record.get("conclusive") is False for record in records):
        notes.append("?: inconclusive, because a second copy of the base was off.")
    return [Table(_COLUMNS, rows, notes=notes)] if rows else []


def _cells(record: Record) -> list[tuple[str, str, str]]:
    if "failure" in record:
        return [("", "failed", record["failure"])]
    unclear = "?" if record.get("conclusive") is False else ""
    ratios = [
        (what, f"{q['median']:.3f}{unclear}", f"{q['lower']:.3f} to {q['upper']:.3f}")
        for what, q in record.get("ratios", {}).items()
    ]
    times = [
        (
            what,
            f"{1000 * q['median']:.0f} ms",
            f"{1000 * q['lower']:.0f} to {1000 * q['upper']:.0f} ms",
        )
        for what, q in record.get("seconds", {}).items()
    ]
    return ratios + times
