"""What `inspect` has found, as tables."""

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

from keras_mp.backends import engine
from keras_mp.tables import Table, folded, in_bytes
from keras_mp.tools.inspection.findings import Finding
from keras_mp.tools.inspection.layer_facts import LayerFacts

_WIDTH = 80
_GAP = 2
_RULE_WIDTH = 19
_MOST_ROWS = 40
# Fact -> the heading of its column.
_SIZES = {
    "weight_bytes_float32": "weights in float32",
    "weight_bytes": "weights",
    "half_copy_bytes": "half copies",
    "output_bytes_float32": "output in float32",
    "output_bytes": "output, bytes",
}


@dataclasses.dataclass(frozen=True, repr=False)
class Inspection:
    """What `inspect` has found; prints as a table.

    Attributes:
        model: the model's name.
        layers: the facts of each layer, parents before children.
        losses: how the loss reads the logits of each large head, a sentence each.
        warnings: what to look at, each with paths, a sentence and a remedy.
    """

    model: str
    layers: tuple[LayerFacts, ...]
    losses: tuple[str, ...]
    warnings: tuple[Finding, ...]

    @property
    def totals(self) -> dict[str, int]:
        """The sums of all sizes that are known, in bytes."""
        return {
            name: sum(getattr(layer, name) or 0 for layer in self.layers)
            for name in _SIZES
        }

    def to_dict(self) -> dict[str, Any]:
        """All of it as dicts, lists, strings and numbers, for JSON."""
        return {
            "model": self.model,
            "layers": [dataclasses.asdict(layer) for layer in self.layers],
            "totals": self.totals,
            "losses": list(self.losses),
            "warnings": [
                {**dataclasses.asdict(warning), "paths": list(warning.paths)}
                for warning in self.warnings
            ],
        }

    def __str__(self) -> str:
        return self.text()

    def text(self, every_layer: bool = False) -> str:
        """A summary, and a table of the layers for a terminal of 80 columns.

        Args:
            every_layer: whether each layer of a large model has a row of its own.
                Otherwise layers that are alike, in class, dtypes and reason, share one
                with the sums of their sizes, if there are more than 40.
        """
        groups = [[layer] for layer in self.layers]
        if not every_layer and len(groups) > _MOST_ROWS:
            groups = _alike(self.layers)
        columns = (
            "computes\nin",
            "returns",
            "decided by",
            "weights\n+ copies",
            "output\nin float32",
        )
        rows = [
            (
                first.compute_dtype or "",
                (first.output_dtype or "?") if first.compute_dtype else "",
                textwrap.fill(first.decided_by, _RULE_WIDTH),
                _weights(group),
                _outputs(group),
            )
            for group in groups
            for first in group[:1]
        ]
        # The paths, which are the longest, get the rest of the line.
        taken = [
            max(len(line) for cell in column for line in cell.split("\n"))
            for column in zip(columns, *rows, strict=True)
        ]
        left = _WIDTH - sum(taken) - _GAP * (len(taken) + 1)
        names = []
        for first, *others in groups:
            classes = [f"  {part}" for part in folded(first.class_name, left - 2)]
            more = [f"and {len(others)} more"] if others else []
            names.append("\n".join([*folded(first.path, left), *more, *classes]))
        notes = self._notes()
        if len(groups) < len(self.layers):
            note = (
                "Layers that are alike share a row, with the sums of their sizes. Each "
                "has its own in print(keras_mp.inspect(model).text(every_layer=True)), "
                "and with `keras-mp inspect --all`."
            )
            notes.insert(1, note)
        return Table(
            ("layer", *columns),
            [(name, *row) for name, row in zip(names, rows, strict=True)],
            "\n".join([self._title(), "", *notes]),
        ).text(_WIDTH)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [
            (
                layer.path,
                layer.class_name,
                layer.compute_dtype or "",
                layer.variable_dtype or "",
                layer.output_dtype or "?",
                layer.decided_by,
                *(in_bytes(getattr(layer, name)) for name in _SIZES),
            )
            for layer in self.layers
        ]
        columns = ("layer", "class", "computes in", "variables", "output", "decided by")
        return Table(
            (*columns, *_SIZES.values()), rows, self._title(), self._notes()
        ).html()

    def _title(self) -> str:
        computing = [layer.compute_dtype for layer in self.layers]
        counts = {dtype: computing.count(dtype) for dtype in computing if dtype}
        text = ", ".join(f"{count} in {dtype}" for dtype, count in counts.items())
        return f"{self.model}: {text or 'no layers'}"

    def _notes(self) -> list[str]:
        total = {name: in_bytes(size) for name, size in self.totals.items()}
        text = f"Weights: {total['weight_bytes']}"
        if self.totals["weight_bytes"] != self.totals["weight_bytes_float32"]:
            text += f" ({total['weight_bytes_float32']} in float32)"
        if self.totals["half_copy_bytes"]:
            text += f", and {total['half_copy_bytes']} of copies in half precision"
        if self.totals["output_bytes"]:
            text += (
                f". Outputs, for one example: {total['output_bytes']} "
                f"({total['output_bytes_float32']} in float32)"
            )
        notes = [f"{text}."]
        if any(_is_unknown(layer) for layer in self.layers):
            notes.append("?: not known without a run, and not in the sums.")
        if any(layer.products for layer in self.layers):
            notes.append(
                "Products in half precision with float32 results: they are most of a "
                "step where a head is large, and what the loss sees is not rounded."
            )
        notes += self.losses
        in_float16 = any(layer.compute_dtype == "float16" for layer in self.layers)
        if in_float16 and not engine.traces:
            notes.append(
                "Constants that float16 cannot hold are not seen without a run: "
                "keras_mp.diagnose(model, x, y) finds the layers."
            )
        if self.warnings:
            notes += ["", "Look at:", *(f"- {warning}" for warning in self.warnings)]
        return notes


def _alike(layers: Sequence[LayerFacts]) -> list[list[LayerFacts]]:
    """Layers that have all but their names and sizes in common, first ones first."""
    groups: dict[Any, list[LayerFacts]] = {}
    for layer in layers:
        # A graph holds other layers in each place.
        key: Any = layer.path
        if layer.compute_dtype is not None:
            known = layer.weight_bytes is not None, layer.output_bytes is not None
            dtypes = layer.compute_dtype, layer.variable_dtype, layer.output_dtype
            key = layer.class_name, dtypes, layer.decided_by, layer.products, known
        groups.setdefault(key, []).append(layer)
    return [*groups.values()]


def _sum(group: Sequence[LayerFacts], size: str) -> int | None:
    """None if it is not known of them."""
    sizes = [getattr(layer, size) for layer in group]
    return None if None in sizes else sum(sizes)


def _weights(group: Sequence[LayerFacts]) -> str:
    weights, copies = _sum(group, "weight_bytes"), _sum(group, "half_copy_bytes")
    if not weights:
        return "?" if weights is None else ""
    lines = [in_bytes(weights)]
    if group[0].variable_dtype != "float32":
        lines.append(str(group[0].variable_dtype))
    if copies:
        lines.append(f"+{in_bytes(copies)}")
    return "\n".join(lines)


def _outputs(group: Sequence[LayerFacts]) -> str:
    if group[0].compute_dtype is None:
        return ""  # Its layers list them.
    sizes = [_sum(group, name) for name in ("output_bytes", "output_bytes_float32")]
    return "\n".join(in_bytes(size) for size in dict.fromkeys(sizes))


def _is_unknown(layer: LayerFacts) -> bool:
    is_graph = layer.compute_dtype is None
    return layer.weight_bytes is None or (not is_graph and layer.output_bytes is None)
