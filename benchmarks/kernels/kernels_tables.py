"""The table of the suite `kernels`."""

from collections.abc import Sequence

from benchmarks.results import Record
from benchmarks.suites import NOT_MEASURED
from keras_mp.tables import Table

AMP, FLOAT32, KERAS, OURS = "torch.amp", "float32", "Keras", "keras_mp"
TRACED = "keras_mp, jit_compile=True"
WAYS = (AMP, FLOAT32, KERAS, OURS, TRACED)
DECODER, CONVOLUTIONS, SUBCLASSED = "decoder", "convolutions", "subclassed"
LOGITS = "logits"
TITLES = {
    DECODER: "decoder, 4 blocks of 256, vocabulary 4096",
    LOGITS: "decoder, 1 block of 64, vocabulary 131072",
    CONVOLUTIONS: "8 convolutions with BatchNormalization",
    SUBCLASSED: "the same, a subclassed model",
}
_NAMES = {FLOAT32: "Keras, float32", KERAS: "Keras, mixed_float16"}


def tables(records: Sequence[Record], whole: bool = False) -> list[Table]:
    """One table: kernels, bytes, memory and host time, and the shares of torch.amp's.

    Args:
        records: of the suite.
        whole: whether cases without a record have a row that says so.
    """
    found = {(r["case"], r["way"]): r for r in records}
    rows = []
    for case, title in TITLES.items():
        mine = {w: found[case, w] for w in WAYS if (case, w) in found}
        for index, (way, record) in enumerate(mine.items()):
            first = "" if index else title
            rows.append((first, _NAMES.get(way, way), *_cells(record, mine.get(AMP))))
        if whole and not mine:
            rows.append((title, "", NOT_MEASURED, "", "", "", ""))
    columns = ("float16", "", "kernels", "bytes", "peak of memory", "waits", "host")
    return [Table(columns, rows)] if rows else []


def _cells(record: Record, base: Record | None) -> list[str]:
    if "failure" in record:
        return ["failed", record["failure"], "", "", ""]

    def cell(name: str, text: str) -> str:
        if base is None or base is record or "failure" in base:
            return text
        return f"{text} ({record[name] / base[name]:.2f})"

    return [
        cell("kernels", f"{record['kernels']}"),
        cell("bytes", f"{record['bytes'] / 1e6:.1f} MB"),
        cell("peak", f"{record['peak'] / 1e6:.1f} MB"),
        f"{record['waits']}",
        _host(record["host"]) if "host" in record else "",
    ]


def _host(ratio: Sequence[float]) -> str:
    median, lower, upper, _ = ratio
    return f"{median:.2f} ({lower:.2f} to {upper:.2f})"
