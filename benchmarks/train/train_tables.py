"""The tables and the picture of the suite `train`."""

from collections.abc import Sequence
from typing import Any

from benchmarks.results import Record
from benchmarks.suites import NOT_MEASURED
from benchmarks.train.cases import TRAIN_CASES, TrainCase
from keras_mp.display.tables import Table, in_bytes

FLOAT32 = "float32", "tf32"
KERAS, TORCH_AMP = "Keras' mixed_float16", "torch.amp"
PRECISIONS = (*FLOAT32, KERAS, TORCH_AMP, "mixed_float16", "mixed_bfloat16")
ON_GPUS_ALONE = "tf32", KERAS, TORCH_AMP
NOT_COUNTED = "not counted"  # torch counts no memory on CPUs
_SHORT = {
    "float32": "float32",
    "tf32": "float32, TF32",
    KERAS: "Keras' float16",
    TORCH_AMP: TORCH_AMP,
    "mixed_float16": "keras_mp, float16",
    "mixed_bfloat16": "keras_mp, bfloat16",
}
# What the others are compared with: on a GPU, float32 in its fastest form.
_BASE = {"gpu": "tf32", "cpu": "float32"}
_COLUMNS = (
    "", "precision", "batch", "examples/s", "speed-up", "memory", "of peak", "fits",
)  # fmt: skip


def tables(records: Sequence[Record], whole: bool = False) -> list[Table]:
    """A table for the GPU and one for the CPU, on each backend.

    Args:
        records: of the suite.
        whole: whether steps without a record have a row that says so.
    """
    return [
        _table(on, backend, records, whole)
        for on in ("gpu", "cpu")
        for backend in ("jax", "torch")
        if whole or any((r["on"], r["backend"]) == (on, backend) for r in records)
    ]


def is_measured(case: TrainCase, on: str, backend: str, precision: str) -> bool:
    """On CPUs only what they have; a case on its backends; `torch.amp` on torch."""
    if on == "cpu" and (precision in ON_GPUS_ALONE or not case.small_title):
        return False
    if backend not in case.backends:
        return False
    return precision != TORCH_AMP or backend == "torch"


def _table(on: str, backend: str, records: Sequence[Record], whole: bool) -> Table:
    mine = [r for r in records if (r["on"], r["backend"]) == (on, backend)]
    places = {(r["case"], r["precision"], r["what"]): r for r in mine}
    rows = []
    for case in TRAIN_CASES:
        title = case.title if on == "gpu" else case.small_title
        base = places.get((case.name, _BASE[on], "speed"), {})
        for precision in PRECISIONS:
            if not is_measured(case, on, backend, precision):
                continue
            speed = places.get((case.name, precision, "speed"))
            fits = places.get((case.name, precision, "fits"))
            if speed is None and not whole:
                continue
            rows.append(
                (title, _SHORT[precision], *_cells(speed, base), _largest(fits))
            )
            title = ""
    devices = dict.fromkeys(r["device"] for r in mine if "device" in r)
    failed = dict.fromkeys(
        f"{r['case']}, {r['precision']}, {r['what']}: {r['failure']}"
        for r in mine
        if "failure" in r
    )
    where = ", ".join(devices) or ("GPU" if on == "gpu" else "CPU")
    return Table(_COLUMNS, rows, title=f"{where}, {backend}", notes=list(failed))


def _cells(speed: Record | None, base: Record) -> tuple[str, ...]:
    if speed is None:
        return ("", NOT_MEASURED, "", "", "")
    if "failure" in speed:
        return ("", "failed", "", "", "")
    rate = speed["examples_per_second"]["median"]
    unscaled = base.get("examples_per_second")
    share = speed["share_of_peak"]
    return (
        str(speed["batch"]),
        f"{rate:.3g}" if rate < 1000 else f"{rate:.0f}",
        f"{rate / unscaled['median']:.2f}" if unscaled else "",
        in_bytes(speed["peak_bytes"]) if speed["peak_bytes"] else NOT_COUNTED,
        "" if share is None else f"{share:.0%}",
    )


def _largest(fits: Record | None) -> str:
    if fits is None or not fits.get("largest_batch"):
        return ""
    return str(fits["largest_batch"])


def plot(records: Sequence[Record]) -> Any:
    """A matplotlib figure of speed-ups and memory, or None without any."""
    places = {
        (r["on"], r["backend"], r["case"], r["precision"]): r
        for r in records
        if "examples_per_second" in r
    }
    ratios: dict[str, dict[str, dict[str, float]]] = {"speed-up": {}, "memory": {}}
    for (on, backend, case, precision), record in places.items():
        base = places.get((on, backend, case, _BASE[on]))
        if base is None or precision in FLOAT32:
            continue
        row = f"{case}, {backend}, {on}"
        speed = record["examples_per_second"]["median"]
        ratios["speed-up"].setdefault(row, {})[_SHORT[precision]] = (
            speed / base["examples_per_second"]["median"]
        )
        if record["peak_bytes"] and base["peak_bytes"]:
            ratios["memory"].setdefault(row, {})[_SHORT[precision]] = (
                record["peak_bytes"] / base["peak_bytes"]
            )
    if not ratios["speed-up"]:
        return None
    from benchmarks.plots import plot_train

    return plot_train(ratios)
