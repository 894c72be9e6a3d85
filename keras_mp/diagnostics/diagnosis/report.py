"""What `diagnose` has found, in text, tables and pictures."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from keras_mp.diagnostics.diagnosis.outcome import Outcome
from keras_mp.diagnostics.diagnosis.ranges import Range, joined
from keras_mp.diagnostics.diagnosis.verdict import Measured, power
from keras_mp.display import page
from keras_mp.display.tables import Table

_ROWS = 12


@dataclasses.dataclass(frozen=True, repr=False)
class Report(Outcome):
    """What one batch has shown; prints as text, with the tensors that fit worst."""

    def _table(
        self, measured: Sequence[Measured], title: str = "", notes: Sequence[str] = ()
    ) -> Table:
        columns = ("tensor", "what", "largest", "smallest", "lost", "headroom")
        return Table(columns, [self._row(m) for m in measured], title, notes)

    def _row(self, measured: Measured) -> tuple[str, ...]:
        found = measured.range
        above, below = measured.headroom(self.scale)
        return (
            measured.path,
            measured.kind.replace("activation ", "activation\n"),
            power(found.largest),
            power(found.smallest),
            f"{measured.lost(self.scale):.0%}" if measured.is_gradient else "",
            f"{above:+d} {below:+d}" if found.largest else "",
        )

    @property
    def worst(self) -> list[Measured]:
        """The tensors in half precision that have the least room, or none."""
        half = [m for m in self.measured if m.half and m.range.largest]
        return sorted(half, key=lambda m: m.room(self.scale))[:_ROWS]

    def _title(self) -> str:
        return f"{self.model}: {self.policy}, loss scale {self.scale:g}"

    def _legend(self) -> str:
        return (
            f"The {len(self.worst)} of {len(self.measured)} tensors with the least "
            "room. Magnitudes are those of float32, unscaled; lost is the share of a "
            "gradient that underflows to 0, and headroom the powers of two above the "
            "largest and below the smallest, in float16 at the loss scale."
        )

    def __str__(self) -> str:
        notes = [*(f"- {sentence}" for sentence in self.sentences), "", self._legend()]
        return self._table(self.worst, self._title(), notes).text()

    __repr__ = __str__

    def plot(self) -> Any:
        """Draws the exponents of the gradients against the range of float16.

        Returns:
            A matplotlib figure, like figure 3 of Micikevicius et al., Mixed Precision
            Training, 2018, of this model.
        """
        from keras_mp.display.plots import plot_gradients

        kinds = {"weights": "gradient", "activations": "activation gradient"}
        found = {
            name: joined(m.range for m in self.measured if m.kind == kind)
            for name, kind in kinds.items()
        }
        return plot_gradients(
            {_label(name, range): range.shares for name, range in found.items()},
            self.scale,
        )

    def _repr_html_(self) -> str:
        kinds = ("output", "activation gradient", "gradient")
        tables = [[m for m in self.measured if m.kind == kind] for kind in kinds]
        return page.cell(
            self._title(),
            page.items(self.sentences),
            page.drawn(self.plot),
            self._table(self.worst, "The least room", [self._legend()]).html(),
            *(
                page.folded(
                    f"All {found[0].kind}s ({len(found)})", self._table(found).html()
                )
                for found in tables
                if found
            ),
        )

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes one file that loads nothing from elsewhere."""
        page.write(path, self._title(), self._repr_html_())


def _label(name: str, found: Range) -> str:
    size = found.size or 1
    beyond = (found.nans + found.infinities) / size
    not_finite = f", {beyond:.0%} are not finite" if beyond else ""
    return f"by {name} ({found.zeros / size:.0%} are 0{not_finite})"
