"""The results of the sweep over models: models.json, and a section of README.md."""

import importlib.metadata
import json
import pathlib
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from sweeps.sections import write_section

RESULTS = pathlib.Path(__file__).with_name("models.json")
PACKAGES = ("keras", "keras-hub", "jax", "tensorflow", "numpy")
# Our ways, each with that of plain Keras to compare it with.
PLAIN = {"global": "keras", "dtype": "keras dtype", "convert": "keras"}
# What fails here and not in plain Keras, by model and way, and why it stays so.
LEFT = {
    ("hub/EfficientNetImageClassifier", "dtype"): (
        "KerasHub gives `dtype=` to no layer of this backbone, but to the head alone, "
        "which is an output layer"
    ),
    ("hub/SAMImageSegmenter", "dtype"): (
        "its prompt encoder makes layers without `dtype=`; keras_mp hands it down to "
        "them, which no file says (`inspect` warns of it); Keras leaves them in float32"
    ),
    ("hub/T5Seq2SeqLM", "convert"): (
        "its graph multiplies by a constant that KerasHub has rounded to the dtype of "
        "the activations when it makes the graph; a converted graph keeps the constant "
        "of float32, a reopened one is made anew"
    ),
}
# Enough to tell one failure from another.
LENGTH = 240
COLOUR = re.compile(r"\x1b\[\d*m")  # Keras prints names in bold.

TEXT = """\
Every architecture of `keras.applications` with random weights, and backbones and tasks
of KerasHub from small configurations, each made mixed in three ways: by the global
policy, by `dtype=` on its layers, by `convert`. A cell is `ok` if the model passes all
of this in all three ways:

- it is built; some layer with weights computes in half precision; the loss is scaled if
  that is float16, and only then; outputs that are floats are float32;
- `fit` takes a step with a finite loss, after which all weights are finite and some
  have changed; the JSON has the number of steps skipped before it, at larger scales;
- predictions are finite and float32; saved and opened under the float32 policy, the
  model predicts the same to the bit;
- `convert` there and back keeps the float32 predictions, to the bit.

`make sweep-models` measures anew, on CPUs: JAX compiles, at XLA's lowest level of
optimization; TensorFlow trains in a graph for the global policy, and does all else
eagerly. Images are 64 by 64 or the smallest that the architecture takes, a batch has 2
(8 for EfficientNet, Inception and ResNet), and BatchNormalization has a momentum of 0,
so that one step trains its statistics. `keras.applications` has no `dtype=`: its layers
are cloned with it.
"""


class Failure(NamedTuple):
    """A kind of failure, the outcome in plain Keras, and why it stays if it does."""

    outcome: str
    plain: str
    left: str


def write(rows: Iterable[dict[str, Any]]) -> None:
    """Writes both files from the rows of a finished sweep."""
    kept = sorted(
        ({k: v for k, v in row.items() if k != "seconds"} for row in rows),
        key=lambda row: (row["model"], row["backend"], row["policy"], row["how"]),
    )
    for row in kept:
        row["outcome"] = COLOUR.sub("", row["outcome"])[:LENGTH]
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    lines = ",\n".join(f"    {json.dumps(row)}" for row in kept)
    RESULTS.write_text(
        f'{{\n  "versions": {json.dumps(versions)},\n  "rows": [\n{lines}\n  ]\n}}\n'
    )
    write_section("Models", _section(versions, kept))


def _section(versions: dict[str, str], rows: list[dict[str, Any]]) -> str:
    failures = _failures(rows)
    numbers = {failure: number for number, failure in enumerate(failures, start=1)}
    columns = sorted({(row["backend"], row["policy"]) for row in rows})
    cells: dict[tuple, str] = {}
    for model in sorted({row["model"] for row in rows}):
        for column in columns:
            cells[model, column] = _cell(model, column, rows, numbers)
    heading = ["model", *(f"{backend}, {policy}" for backend, policy in columns)]
    table = [heading, ["---"] * len(heading)]
    for model in sorted({row["model"] for row in rows}):
        table.append([model, *(cells[model, column] for column in columns)])
    ours = [row for row in rows if row["how"] in PLAIN]
    passed = sum(row["outcome"] == "ok" for row in ours)
    parts = [
        TEXT,
        ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
        f"{len(cells) // len(columns)} models, {passed} of {len(ours)} rows are ok.",
        "\n".join(f"| {' | '.join(line)} |" for line in table),
    ]
    if failures:
        parts.append("What failed, and what plain Keras does there:")
        parts.append(
            "\n".join(
                f"{numbers[failure]}. `{failure.outcome}`. Plain Keras: "
                f"{failure.plain}.{failure.left}"
                for failure in failures
            )
        )
    return "\n\n".join(part.strip() for part in parts)


def _cell(
    model: str, column: tuple, rows: list[dict[str, Any]], numbers: dict[Failure, int]
) -> str:
    failed = defaultdict(list)
    for row in rows:
        here = row["model"] == model and (row["backend"], row["policy"]) == column
        if here and row["how"] in PLAIN and row["outcome"] != "ok":
            failed[_failure(row, rows)].append(row["how"])
    if not failed:
        return "ok"
    return "; ".join(
        f"{', '.join(how) if len(how) < len(PLAIN) else 'all'}: {numbers[failure]}"
        + (" (Keras too)" if failure.plain != "ok" else "")
        for failure, how in failed.items()
    )


def _failures(rows: list[dict[str, Any]]) -> list[Failure]:
    failed = [r for r in rows if r["how"] in PLAIN and r["outcome"] != "ok"]
    return list(dict.fromkeys(_failure(row, rows) for row in failed))


def _failure(row: dict[str, Any], rows: list[dict[str, Any]]) -> Failure:
    names = ("model", "backend", "policy", "how")
    plain = [row[name] for name in names[:-1]] + [PLAIN[row["how"]]]
    keras = [r for r in rows if [r[name] for name in names] == plain]
    outcome = keras[0]["outcome"] if keras else "not run"
    if outcome not in ("ok", "not run"):
        outcome = f"`{_kind(outcome)}`"
    left = LEFT.get((row["model"], row["how"])) if outcome == "ok" else None
    return Failure(_kind(row["outcome"]), outcome, f" Left so: {left}." if left else "")


def _kind(outcome: str) -> str:
    """A failure without what differs from model to model; the JSON has all of it."""
    outcome = re.sub(r" by up to \S+", "", outcome)
    return re.sub(r"\bb?float16\b", "half precision", outcome)
