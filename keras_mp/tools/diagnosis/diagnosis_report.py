"""What `diagnose` has found, in text, tables and pictures."""

import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from keras_mp.loss_scaling.nonfinite import named
from keras_mp.tables import Table
from keras_mp.tools.diagnosis.departure import Departure
from keras_mp.tools.diagnosis.ranges import FLOAT16, Range, joined
from keras_mp.tools.diagnosis.verdict import LOST, Measured, Verdict, power, window_of
from keras_mp.tools.display import page
from keras_mp.tools.inspection.findings import Finding

_ROWS = 12
_OUTPUTS = 2  # This many that overflow are drawn, and come before the other rows.


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """What one batch has shown; prints as text, with the tensors that fit worst.

    Attributes:
        model: the model's name.
        policy: the mixed policy that it has, or "float32".
        scale: the present loss scale.
        measured: the ranges of outputs, activation gradients and gradients in float32,
            in the order in which they are computed.
        verdict: what they mean for float16.
        broken_in_float32: the first output, or part of the batch, that is not finite in
            float32; or empty.
        broken: the first output that is not finite in half precision only; or empty.
        broken_values: its range in half precision.
        departure: where float16 departs from float32 though all is finite and in
            range; or None.
        suits: "float16", else "bfloat16", if all fits and outputs and loss agree with
            float32's on this batch; or empty.
        epsilons: layers whose epsilon becomes 0 in half precision.
        kept: the layers that should stay in float32.
        cured: whether all is finite and agrees with these in float32; None if there are
            none.
    """

    model: str
    policy: str
    scale: float
    measured: tuple[Measured, ...]
    verdict: Verdict
    broken_in_float32: str
    broken: str
    broken_values: Range | None
    departure: Departure | None
    suits: str
    epsilons: tuple[Finding, ...]
    kept: tuple[str, ...]
    cured: bool | None

    @property
    def recommended(self) -> str:
        """The half dtype that suits the model: float16, with its bits, if all fits."""
        return self.suits or "float16"

    @property
    def line(self) -> str:
        """The policy to paste, with the layers that should stay in float32.

        Empty if it is not enough, or if there are none.
        """
        if not self.cured:
            return ""
        patterns = [re.escape(path) for path in self.kept]
        return f"keras_mp.MixedFloat16(float32={patterns!r})"

    @property
    def sentences(self) -> list[str]:
        """The verdict as sentences, in the order of the computation."""
        if self.broken_in_float32:
            # This explains everything else.
            return [
                f"{self.broken_in_float32} is the first that is not finite, in float32 "
                "as well: precision is not the cause."
            ]
        return [*self._forward(), *self._backward(), *self._advice()]

    def _forward(self) -> Iterator[str]:
        if self.verdict.overflowing:
            first, *others = self.verdict.overflowing
            more = f": the first of {1 + len(others)} outputs that overflow"
            yield (
                f"{first.path} returns magnitudes of up to {first.range.largest:.3g}, "
                f"and float16 ends at 65504{more if others else ''}."
            )
        elif self.broken:
            yield (
                f"{self.broken} is the first whose output is not finite in half "
                "precision: a value within it overflows. In float32 its output is "
                "finite, and small enough for float16."
            )
        if self.departure:
            yield str(self.departure)
        for finding in self.epsilons:
            yield f"{', '.join(finding.paths)}: {finding.sentence}"

    def _backward(self) -> Iterator[str]:
        verdict, window = self.verdict, self.verdict.window
        if verdict.too_large:
            first = verdict.too_large[0]
            yield (
                f"At the present loss scale, {self.scale:g}, the {first.kind} of "
                f"{first.path} overflows first: it is up to {first.range.largest:.3g} "
                "unscaled."
            )
        if verdict.too_small:
            worst = max(verdict.too_small, key=lambda m: m.lost(self.scale))
            count = len(verdict.too_small)
            some = f"{count} gradients lose more than {LOST:.2%} of their magnitude; "
            yield (
                f"At the present loss scale, {self.scale:g}, "
                f"{some if count > 1 else ''}the {worst.kind} of {worst.path} loses "
                f"{worst.lost(self.scale):.0%} of its magnitude."
            )
        holds = f"{self.scale:g}, {'is' if window.holds(self.scale) else 'is not'}"
        if not verdict.outliers:
            yield (
                f"Every gradient fits into float16 at loss scales from {window}; the "
                f"present one, {holds} among them."
            )
            return
        others = named([f"{m.path} ({_fits_at(m)})" for m in verdict.outliers])
        yield (
            "There is no loss scale at which every gradient fits into float16: all but "
            f"{others} fit at loss scales from {window}. The present one, {holds} "
            "among these."
        )

    def _advice(self) -> Iterator[str]:
        if self.suits == "float16":
            yield "float16 suits this model: it has 3 bits more than bfloat16."
        elif self.suits == "bfloat16":
            yield (
                "bfloat16 suits this model: its range is that of float32, and it needs "
                "no loss scale. It has 3 bits less than float16."
            )
        else:
            yield "Neither float16 nor bfloat16 holds all of it."
        if self.line:
            yield (
                "With these layers in float32 all outputs and gradients are finite, "
                f"and outputs and loss agree with float32's: {self.line}"
            )
        elif self.kept:
            yield (
                f"Keeping {named(self.kept)} in float32 is not enough. Run "
                "keras_mp.find_float32_layers(model, x, y)."
            )
        elif self.departure or self.broken or self.verdict.overflowing:
            # An operation of a graph computes in the dtype of its inputs.
            yield 'Cast the input of that operation: keras.ops.cast(x, "float32").'

    def to_dict(self) -> dict[str, Any]:
        """All of it as dicts, lists, strings and numbers, for JSON."""
        window = self.verdict.window
        return {
            "model": self.model,
            "policy": self.policy,
            "loss_scale": self.scale,
            "sentences": self.sentences,
            "recommended": self.recommended,
            "float32": list(self.kept),
            "line": self.line,
            "window": [window.lowest, window.highest] if window.is_open else None,
            "tensors": [m.to_dict(self.scale) for m in self.measured],
        }

    def _table(
        self, measured: Sequence[Measured], title: str = "", notes: Sequence[str] = ()
    ) -> Table:
        columns = (
            "tensor",
            "what",
            "largest",
            "smallest",
            "lost",
            "headroom in\npowers of 2",
        )
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
            self._not_finite(measured)
            or (f"{above:+d} {below:+d}" if found.largest else ""),
        )

    def _not_finite(self, measured: Measured) -> str:
        """What the first output that is not finite in half precision holds."""
        found = self.broken_values
        if found is None or (measured.path, measured.kind) != (self.broken, "output"):
            return ""
        return "nan" if found.nans else "inf"

    @property
    def overflowed(self) -> list[Measured]:
        """The first outputs that are not finite in half precision, or none."""
        broken = [m for m in self.measured if self._not_finite(m)]
        others = [m for m in self.verdict.overflowing if m not in broken]
        return [*broken, *others][:_OUTPUTS]

    @property
    def worst(self) -> list[Measured]:
        """The tensors in half precision that have the least room, or none.

        An output that overflows comes first: the gradients follow from it.
        """
        first = self.overflowed
        half = [m for m in self.measured if m.half and m.range.largest]
        others = [m for m in half if m not in first]
        return [*first, *sorted(others, key=lambda m: m.room(self.scale))][:_ROWS]

    def _title(self) -> str:
        return f"{self.model}: {self.policy}, loss scale {self.scale:g}"

    def _legend(self) -> str:
        first = ", outputs that overflow first" if self.overflowed else ""
        return (
            f"The {len(self.worst)} of {len(self.measured)} tensors with the least "
            f"room{first}. Magnitudes are float32's, unscaled; lost is the share "
            "of a gradient that underflows to 0, and headroom what is left above the "
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
        from keras_mp.tools.display.plots import plot_gradients

        kinds = {"weights": "gradient", "activations": "activation gradient"}
        found = {
            name: joined(m.range for m in self.measured if m.kind == kind)
            for name, kind in kinds.items()
        }
        return plot_gradients(
            {_label(name, range): range.shares for name, range in found.items()},
            self.scale,
            {m.path: m.range.shares for m in self.overflowed},
        )

    def _repr_html_(self) -> str:
        kinds = ("output", "activation gradient", "gradient")
        tables = [[m for m in self.measured if m.kind == kind] for kind in kinds]
        return page.cell(
            self._title(),
            self.sentences,
            self.plot,
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


def _fits_at(measured: Measured) -> str:
    window = window_of(measured.range, FLOAT16)
    if window.is_open:
        return str(window)
    if measured.range.overflowing(FLOAT16):
        return "too large at any"
    return "too wide or too small at any"
