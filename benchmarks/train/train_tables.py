"""The tables and the picture of the suite `train`."""

import itertools
from collections.abc import Sequence
from typing import Any

from benchmarks.results import Record
from benchmarks.suites import NOT_MEASURED, without_empty
from benchmarks.train.cases import TRAIN_CASES, TrainCase
from keras_mp.tables import Table, in_bytes

IN_SHORT = "decoder", "resnet50", "mlp"
FLOAT32 = "float32", "tf32"
KERAS, TORCH_AMP = "Keras' mixed_float16", "torch.amp"
PRECISIONS = (*FLOAT32, KERAS, TORCH_AMP, "mixed_float16", "mixed_bfloat16")
ON_GPUS_ALONE = "tf32", KERAS, TORCH_AMP
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
    title = f"{where}, {backend}"
    return Table(*without_empty(_COLUMNS, rows), title=title, notes=list(failed))


def glance(records: Sequence[Record]) -> tuple[Table, list[Record]]:
    """One row for a model on a backend: speed and memory over float32, on a GPU.

    Returns:
        The table, and the records that it shows.
    """
    ways = KERAS, TORCH_AMP, "mixed_float16"
    places = {
        (r["backend"], r["case"], r["precision"]): r
        for r in records
        if r["on"] == "gpu" and "examples_per_second" in r
    }
    rows, used = [], []
    for backend, case in itertools.product(("jax", "torch"), TRAIN_CASES):
        base = places.get((backend, case.name, _BASE["gpu"]))
        mine = [places.get((backend, case.name, way)) for way in ways]
        if case.name not in IN_SHORT or base is None:
            continue
        rows.append((backend, case.title, *(_beside(r, base) for r in mine)))
        used += [base, *filter(None, mine)]
    columns = "", "", "Keras' mixed_float16", "torch.amp", "keras_mp"
    return Table(*without_empty(columns, rows)), used


def _beside(record: Record | None, base: Record) -> str:
    if record is None:
        return ""
    speed = [r["examples_per_second"]["median"] for r in (record, base)]
    memory = record["peak_bytes"] / base["peak_bytes"]
    return f"{speed[0] / speed[1]:.2f} in {memory:.2f}"


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
        in_bytes(speed["peak_bytes"]) if speed["peak_bytes"] else "",
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
