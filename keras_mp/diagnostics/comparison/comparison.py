"""What `compare` has found, in words, a table and pictures."""

import dataclasses
import os
import textwrap
from typing import Any

from keras_mp.diagnostics.comparison.outcomes import Outcomes
from keras_mp.diagnostics.comparison.text import in_seeds, sentences_on, table_of
from keras_mp.display import page


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Outcomes):
    """Trainings that differ in policy and seed; prints in words, with a table."""

    @property
    def sentences(self) -> list[str]:
        """What differs, in words."""
        return sentences_on(self)

    def _title(self) -> str:
        return (
            f"{len(self.policies)} policies, {in_seeds(len(self.seeds))}, "
            f"{self.epochs} epoch{'s' if self.epochs > 1 else ''}, on {self.backend}"
        )

    def __str__(self) -> str:
        lines = [
            textwrap.fill(f"- {x}", 80, subsequent_indent="  ") for x in self.sentences
        ]
        return table_of(self, "\n".join([self._title(), "", *lines])).text()

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """All of it in dicts, lists, texts and numbers, as JSON has them.

        What JSON has no number for, nan and infinity, is None.
        """
        return {"sentences": self.sentences, **super().to_dict()}

    def plot(self) -> Any:
        """Draws the training losses, a final metric, and time and memory.

        The metric is the first that is not the loss, if there is one.

        Returns:
            A matplotlib figure.
        """
        from keras_mp.display.plots.comparison import plot_comparison

        metric = next((m for m in self.metrics if m != "loss"), "loss")
        costs = {"time per step": self.time, "peak memory": self.memory}
        return plot_comparison(
            {p: [t.losses for t in self.of(p)] for p in self.policies},
            metric,
            {p: self.values(p, metric) for p in self.policies},
            {
                what: {p: cost(p) for p in self.policies[1:]}
                for what, cost in costs.items()
            },
        )

    def _repr_html_(self) -> str:
        return page.cell(
            self._title(),
            page.items(self.sentences),
            page.drawn(self.plot),
            table_of(self).html(),
        )

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes one file that loads nothing from elsewhere."""
        page.write(path, self._title(), self._repr_html_())
