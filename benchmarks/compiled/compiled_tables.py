"""The tables of the suite `compiled`."""

from collections.abc import Sequence

from benchmarks.compiled.cases import CASES
from benchmarks.compiled.devices import DEVICES
from benchmarks.results import Record
from benchmarks.suites import NOT_MEASURED, without_empty
from keras_mp.tables import Table

FLOAT32, KERAS, OURS = "float32", "Keras", "keras_mp"
RECOMPUTED, BFLOAT16, BY_HAND = "recompute_logits", "bfloat16", "by hand"
# Their names in titles.
BACKENDS = {"jax": "JAX", "tensorflow": "TensorFlow"}
WAYS = (FLOAT32, KERAS, OURS, RECOMPUTED, BFLOAT16, BY_HAND)


def tables(records: Sequence[Record], whole: bool = False) -> list[Table]:
    """Tables of a device and backend: speed and memory over those of float32 there.

    Args:
        records: of the suite.
        whole: whether models without a record have a row that says so.
    """
    found = [
        _table(device, backend, records, whole)
        for device in DEVICES
        for backend in BACKENDS
    ]
    return [table for table in found if table is not None]


def _table(
    device: str, backend: str, records: Sequence[Record], whole: bool
) -> Table | None:
    records = [r for r in records if r["backend"] == backend]
    found = {(r["case"], r["way"]): r for r in records}
    rows = []
    for name, case in CASES.items():
        mine = {way: found.get((f"{device}: {name}", way)) for way in WAYS}
        is_wanted = whole or any(mine.values())
        if is_wanted and case.is_compiled(device, backend):
            rows.append((case.title, *(_cell(mine[w], mine[FLOAT32]) for w in WAYS)))
    if not rows:
        return None
    failed = [
        f"{r['case']}, {r['way']}: {r['failure']}"
        for r in records
        if "failure" in r and r["case"].startswith(f"{device}:")
    ]
    half = DEVICES[device].half
    columns = ("", FLOAT32, f"Keras' {half}", OURS, RECOMPUTED, BFLOAT16, BY_HAND)
    title = f"{device}, {half}, {BACKENDS[backend]}: speed-up over float32, and memory"
    return Table(*without_empty(columns, rows), title=title, notes=failed)


def _cell(record: Record | None, base: Record | None) -> str:
    if record is None:
        return NOT_MEASURED if base is None else ""
    if "failure" in record or base is None or "failure" in base:
        return "failed"
    if record is base:
        return f"{1e3 * base['seconds']:.2f} ms, {base['peak'] / 1e9:.2f} GB"
    speed = base["seconds"] / record["seconds"]
    return f"{speed:.2f} in {record['peak'] / base['peak']:.2f}"
