"""Renders layers.json as the section "Layers" of README.md."""

import json
import pathlib
from typing import Any

from sweeps.sections import write_section

RESULTS = pathlib.Path(__file__).with_name("layers.json")
BACKENDS = ("jax", "tensorflow", "torch")
DTYPES = ("float16", "bfloat16")
OK = "ok"
WORST = (OK, "error", "not finite", "raises")

INTRODUCTION = """\
Every layer class that Keras {keras} exports, on usual inputs and on hard ones: large,
all zero, many, masked. Each runs under Keras' own `mixed_float16` and `mixed_bfloat16`,
and, after the arrow where that differs, under `keras_mp.MixedFloat16()` and
`MixedBFloat16()`, against a float32 layer with the same weights. Measured on CPUs
({versions}). Cases that are wrong nowhere have no row.

A number is the largest error of an output or a gradient, over all ways to run the layer
({ways}; `fit` is two steps of it), relative to the largest magnitude of that output
or gradient in float32. In **bold**: **raises**, **not finite** where float32 is,
**an error** that rounding does not explain: for results of magnitude m, more than
6 sqrt(8) (u m + s), where u is 2^-11 for float16 and 2^-8 for bfloat16 and s the
smallest number of the dtype ([`layer_errors.py`](layer_errors.py) has the reason). If
only some ways are wrong, they follow in brackets.
[`layer_cases.py`](layer_cases.py) has the inputs, [`layers.json`](layers.json) every
way to run the cases below, and the exceptions.
`make sweep-layers` measures anew.
"""


def write() -> None:
    """Puts the table into README.md."""
    write_section("Layers", rendered(json.loads(RESULTS.read_text())))


def rendered(results: dict[str, Any]) -> str:
    measured = [b for b in BACKENDS if b in results]
    versions = {b: results[b]["versions"] for b in measured}
    columns = [(b, dtype) for b in measured for dtype in DTYPES]
    names = {n for b in measured for n, c in results[b]["cases"].items() if c != OK}
    head = ["", *(f"{b}, {dtype}" for b, dtype in columns)]
    lines = [
        INTRODUCTION.format(
            keras=versions[measured[0]]["keras"],
            versions=", ".join(f"{b} {versions[b][b]}" for b in measured),
            ways="; ".join(f"{b}: {', '.join(_ways(results[b]))}" for b in measured),
        ),
        _row(["Cases that are wrong", *head[1:]]),
        _row(["---"] * len(head)),
    ]
    for who, label in (("stock", "stock Keras"), ("ours", "keras_mp")):
        counts = [_wrong(results[b]["cases"], dtype, who) for b, dtype in columns]
        lines.append(_row([label, *counts]))
    lines += ["", _row(["Case", *head[1:]]), _row(["---"] * len(head))]
    for name in sorted(names, key=str.lower):
        cells = [_cell(results[b]["cases"].get(name), dtype) for b, dtype in columns]
        lines.append(_row([name, *cells]))
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _wrong(cases: dict[str, Any], dtype: str, who: str) -> str:
    wrong = sum(
        any(outcome["status"] != OK for outcome in case[dtype][who].values())
        for case in cases.values()
        if case != OK
    )
    return f"{wrong} of {len(cases)}"


def _cell(case: Any, dtype: str) -> str:
    if case is None or case == OK:
        return case or ""
    stock, ours = (_text(case[dtype][who]) for who in ("stock", "ours"))
    return stock if stock == ours else f"{stock} → {ours}"


def _text(modes: dict[str, Any]) -> str:
    """The worst of all modes, as the text of a cell."""
    status = max((o["status"] for o in modes.values()), key=WORST.index, default=OK)
    errors = [
        error
        for outcome in modes.values()
        if outcome["status"] == status
        for error in (outcome.get("output"), outcome.get("gradient"))
        if error is not None
    ]
    worst = f"{max(errors):.1g}" if errors else OK
    if status == OK:
        return worst
    hit = sorted(mode for mode, o in modes.items() if o["status"] == status)
    text = f"**{worst if status == 'error' and errors else status}**"
    return text if len(hit) == len(modes) else f"{text} ({', '.join(hit)})"


def _ways(results: dict[str, Any]) -> list[str]:
    """The ways in which the layers ran: eager, jit, graph, xla, fit."""
    outcomes = (
        policies["stock"]
        for by_dtype in results["cases"].values()
        if by_dtype != OK
        for policies in by_dtype.values()
    )
    return sorted({way for by_way in outcomes for way in by_way})


if __name__ == "__main__":
    write()
