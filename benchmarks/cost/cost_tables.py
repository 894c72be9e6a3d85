"""The tables and the picture of the suite `cost`."""

from collections.abc import Sequence
from typing import Any

from benchmarks import BACKENDS
from benchmarks.cost.cases import CASES
from benchmarks.cost.peers import PEERS
from benchmarks.pairs import OFF
from benchmarks.results import Record
from benchmarks.suites import NOT_MEASURED
from keras_mp.tables import Table

UNCLEAR = "?"
REASONS = ("missing", "disagrees", "failed", "slow")  # why a peer has no number


def tables(records: Sequence[Record], whole: bool = False) -> list[Table]:
    """A table of ratios for each backend.

    Args:
        records: of the suite.
        whole: whether cases without a record have a row that says so.
    """
    return [
        _table(backend, mine, whole)
        for backend in BACKENDS
        if (mine := [r for r in records if r["backend"] == backend]) or whole
    ]


def _table(backend: str, records: Sequence[Record], whole: bool) -> Table:
    found = {record["case"]: record for record in records}
    measured = [r for r in records if "peers" in r]
    peers = [p for p in PEERS if any(p.name in r["peers"] for r in measured)]
    rows = []
    for case in CASES:
        if case.name in found:
            cells = [cell(found[case.name], p.name, p.family) for p in peers]
            rows.append((case.title, *(cells or ["failed"])))
        elif whole and backend in case.backends:
            rows.append((case.title, NOT_MEASURED, *[""] * (len(peers) - 1)))
    return Table(
        ("step time over unscaled", *([p.name for p in peers] or ["keras_mp"])),
        rows,
        title=backend,
        notes=list(_notes(records)),
    )


def cell(record: Record, peer: str, family: str) -> str:
    """The median ratio of a peer, or why there is none."""
    if "failure" in record:
        return "failed"
    found = record["peers"].get(peer)
    if found is None:
        return ""
    for reason in REASONS:
        if reason in found:
            return reason
    clear = record["controls"][family]["conclusive"]
    return f"{found['ratio']['median']:.2f}{'' if clear else UNCLEAR}"


def _notes(records: Sequence[Record]) -> list[str]:
    notes: list[str] = []
    unclear = [
        (record["case"], family, control["ratio"]["median"])
        for record in records
        for family, control in record.get("controls", {}).items()
        if not control["conclusive"]
    ]
    if unclear:
        cases = ", ".join(f"{c} ({f}: {m:.2f})" for c, f, m in unclear)
        notes.append(
            f"{UNCLEAR}: inconclusive, because a second copy of the base was more than "
            f"{OFF:.0%} off the first: {cases}."
        )
    reasons: dict[str, list[str]] = {}
    for record in records:
        if "failure" in record:
            reasons.setdefault(f"failed: {record['failure']}", []).append(
                record["case"]
            )
        for peer, found in record.get("peers", {}).items():
            for reason in REASONS:
                if reason in found:
                    text = f"{peer} {reason}: {found[reason]}"
                    reasons.setdefault(text, []).append(record["case"])
    for reason, where in reasons.items():
        every = len(where) == len(records) and len(where) > 1
        notes.append(reason + ("" if every else f" (in {', '.join(where)})"))
    return notes


def details(records: Sequence[Record]) -> Table:
    """Quartiles, pairs and times: a row for each peer in each case."""
    rows = []
    for record in records:
        for family, control in record.get("controls", {}).items():
            rows.append(
                (
                    *(record["case"], record["backend"], f"control ({family})"),
                    *_quartiles(control["ratio"]),
                    _milliseconds(control["base_seconds"]),
                    "",
                )
            )
        for peer, found in record.get("peers", {}).items():
            if "ratio" in found:
                rows.append(
                    (
                        *(record["case"], record["backend"], peer),
                        *_quartiles(found["ratio"]),
                        _milliseconds(found["step_seconds"]),
                        f"{found['first_step_seconds']:.1f} s",
                    )
                )
    columns = ("case", "backend", "peer", "median", "quartiles", "pairs", "a step",
               "first step")  # fmt: skip
    return Table(columns, rows)


def _quartiles(ratio: dict[str, float]) -> tuple[str, str, str]:
    return (
        f"{ratio['median']:.3f}",
        f"{ratio['lower']:.3f} to {ratio['upper']:.3f}",
        str(ratio["number"]),
    )


def _milliseconds(seconds: dict[str, float]) -> str:
    return f"{1000 * seconds['median']:.3g} ms"


def plot(records: Sequence[Record]) -> Any:
    """A matplotlib figure of the ratios, or None without any."""
    ratios = {}
    unclear = []
    for record in records:
        case = f"{record['case']}, {record['backend']}"
        found = {
            peer: (r["median"], r["lower"], r["upper"])
            for peer, entries in record.get("peers", {}).items()
            if (r := entries.get("ratio"))
        }
        if found:
            ratios[case] = found
        if not all(c["conclusive"] for c in record.get("controls", {}).values()):
            unclear.append(case)
    if not ratios:
        return None
    from benchmarks.plots import plot_cost

    return plot_cost(ratios, unclear)
