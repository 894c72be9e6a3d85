"""What `compare` has found, in text, a table and pictures."""

import dataclasses
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from keras_mp.backends import engine
from keras_mp.tables import Table, in_bytes
from keras_mp.tools.comparison import judgement
from keras_mp.tools.comparison.judgement import Difference, Ratio
from keras_mp.tools.comparison.outcomes import Outcomes
from keras_mp.tools.display import page

_CLAUSES = {
    judgement.DIFFERS: f"{{metric}} {judgement.DIFFERS}: {{by}} (95%: {{limits}})",
    judgement.UNCLEAR: f"{judgement.UNCLEAR} in {{metric}} (95%: {{limits}})",
    judgement.NO_SCIPY: "{metric} changes by {each} with the seeds",
    judgement.ONE_SEED: "{metric} is {by}, and one seed gives no verdict",
    judgement.SAME: "{metric} is the same as under {base}",
}


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Outcomes):
    """Trainings that differ in policy and seed; prints as text, with a table."""

    @property
    def sentences(self) -> list[str]:
        """What differs in the metrics, what it costs, and the notes."""
        base, *others = self.policies
        sentences = [*self._diverged(base)]
        for policy in others:
            sentences += self._diverged(policy)
            if judged := list(self._judged(policy)):
                sentences.append(f"{policy}: {'; '.join(judged)}.")
        verdicts = {self.difference(p, m).verdict for p in others for m in self.metrics}
        if judgement.NO_SCIPY in verdicts:
            sentences.append(f"No verdict. {judgement.NEEDS_SCIPY}")
        sentences.append(
            _cost("Speed", base, {p: self._speed_against(p) for p in others})
            or "Speed was not measured: it takes more steps, or a second epoch."
        )
        sentences.append(
            _cost("Peak memory", base, {p: self._memory_against(p) for p in others})
            or f"Peak memory was not measured: {engine.why_no_memory}."
        )
        for policy in self.policies:
            if any(t.skipped_steps for t in self.of(policy)):
                each = f" with each of {self._seeds}" if len(self.seeds) > 1 else ""
                sentences.append(f"{policy} skipped {self._skips(policy)} steps{each}.")
        return [*sentences, *self.notes]

    def __str__(self) -> str:
        lines = [self._title(), "", *(f"- {x}" for x in self.sentences)]
        return self._table("\n".join(lines)).text()

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """All of it as dicts, lists, strings and numbers, for JSON.

        nan and infinity, which JSON lacks, are None.
        """
        return {"sentences": self.sentences, **super().to_dict()}

    def plot(self) -> Any:
        """Draws the training losses, a final metric, and speed and memory.

        The metric is the first that is not the loss, if there is one.

        Returns:
            A matplotlib figure.
        """
        from keras_mp.tools.display.plots.comparison import plot_comparison

        base, *others = self.policies
        metric = next((m for m in self.metrics if m != "loss"), "loss")
        return plot_comparison(
            {p: [t.losses for t in self.of(p)] for p in self.policies},
            metric,
            {p: self.values(p, metric) for p in self.policies},
            judgement.spread_of(self.values(base, metric)),
            {
                "speed": {p: self.speed(p) for p in others},
                "peak memory": {p: self.memory(p) for p in others},
            },
        )

    def _repr_html_(self) -> str:
        table = self._table().html()
        return page.cell(self._title(), self.sentences, self.plot, table)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes one file that loads nothing from elsewhere."""
        page.write(path, self._title(), self._repr_html_())

    @property
    def _seeds(self) -> str:
        return f"{len(self.seeds)} seed{'s' if len(self.seeds) > 1 else ''}"

    def _title(self) -> str:
        return (
            f"{len(self.policies)} policies, {self._seeds}, "
            f"{self.epochs} epoch{'s' if self.epochs > 1 else ''}, on {self.backend}"
        )

    def _diverged(self, policy: str) -> Iterator[str]:
        diverged = [t.diverged for t in self.of(policy) if t.diverged]
        if diverged:
            count = f"{len(diverged)} of {self._seeds}"
            yield f"{policy} diverged with {count}: {diverged[0]}."

    def _judged(self, policy: str) -> Iterator[str]:
        """A policy's metrics as clauses, what differs first."""
        found = [(m, self.difference(policy, m)) for m in self.metrics]
        for verdict, clause in _CLAUSES.items():
            for metric, d in found:
                if d.verdict == verdict:
                    yield clause.format(
                        metric=metric,
                        by=_by(d),
                        base=self.policies[0],
                        limits=" to ".join(map(_signed, d.interval)),
                        each=", ".join(map(_signed, d.of_seeds)),
                    )

    def _table(self, title: str = "") -> Table:
        """One row for each policy in each metric and cost."""
        base = self.policies[0]
        rows = []
        for what, cells in self._cells():
            for policy, (value, versus) in zip(self.policies, cells, strict=True):
                if policy == base:
                    rows.append((what, policy, value, ""))
                else:
                    rows.append(("", policy, value, versus))
        columns = ("what", "policy", "mean ± spread", f"against {base}")
        return Table(columns, rows, title)

    def _cells(self) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        """A metric or cost, and two cells for each policy."""
        for metric in self.metrics:
            yield metric, [self._metric(p, metric) for p in self.policies]
        if any(t.diverged for t in self.trainings):
            counts = [sum(bool(t.diverged) for t in self.of(p)) for p in self.policies]
            yield "diverged", [(f"{count} of {self._seeds}", "") for count in counts]
        yield "step time", [self._time(p) for p in self.policies]
        yield "peak memory", [self._memory(p) for p in self.policies]
        yield "skipped steps", [(self._skips(p), "") for p in self.policies]

    def _metric(self, policy: str, metric: str) -> tuple[str, str]:
        difference = self.difference(policy, metric)
        alone = difference.verdict in (judgement.SAME, judgement.NOTHING)
        by = "" if alone else f"{_signed(difference.mean)}, "
        return _mean_and_spread(self.values(policy, metric)), by + difference.verdict

    def _time(self, policy: str) -> tuple[str, str]:
        mean = _mean_and_spread([1000 * x for x in self._seconds(policy)])
        return f"{mean} ms" if mean else "not measured", self._speed_against(policy)

    def _memory(self, policy: str) -> tuple[str, str]:
        peaks = self._peaks(policy)
        if not peaks:
            return "not measured", ""
        # With digits enough for the ratio beside it.
        mean = in_bytes(round(statistics.fmean(peaks)), digits=3)
        return mean, self._memory_against(policy)

    def _seconds(self, policy: str) -> list[float]:
        return [t.seconds_per_step for t in self.of(policy) if t.seconds_per_step]

    def _peaks(self, policy: str) -> list[int]:
        return [t.peak_memory for t in self.of(policy) if t.peak_memory]

    def _speed_against(self, policy: str) -> str:
        """How many times as fast: no verdict on one seed, or if seeds disagree."""
        found, base = self.speed(policy), self._seconds(self.policies[0])
        if found is not None and len(self.seeds) == 1:
            return judgement.ONE_SEED
        return _times(found, self._seconds(policy), base, "times as fast")

    def _memory_against(self, policy: str) -> str:
        found, base = self.memory(policy), self._peaks(self.policies[0])
        return _times(found, base, self._peaks(policy), "times as much")

    def _skips(self, policy: str) -> str:
        every = [t.skipped_steps for t in self.of(policy)]
        counts = [count for count in every if count is not None]
        if not counts:
            return "no loss scale"
        return " to ".join(map(str, sorted({min(counts), max(counts)})))


def _cost(what: str, base: str, against: dict[str, str]) -> str:
    found = {policy: text for policy, text in against.items() if text}
    if judgement.ONE_SEED in found.values():
        return f"{what} is not compared: one seed gives no verdict. Give `seeds=3`."
    each = "; ".join(f"{policy} {text}" for policy, text in found.items())
    return f"{what} against {base}: {each}." if each else ""


def _times(
    found: Ratio | None, under: Sequence[float], over: Sequence[float], unit: str
) -> str:
    """The ratio of the two means, which are printed, and the range over the seeds."""
    if found is None:
        return ""
    mean = statistics.fmean(over) / statistics.fmean(under)
    low, high = min(found.lowest, mean), max(found.highest, mean)
    if low < 1 < high:
        return f"unclear: {low:.2f} to {high:.2f} {unit}"
    return Ratio(mean, low, high).text(unit)


def _mean_and_spread(values: Sequence[float]) -> str:
    finite = [x for x in values if math.isfinite(x)]
    if not finite:
        return ""
    mean, size = f"{statistics.fmean(finite):.4g}", judgement.spread_of(finite)
    return mean if size is None else f"{mean} ± {_short(size)}"


def _by(difference: Difference) -> str:
    direction = "higher" if difference.mean > 0 else "lower"
    return f"{_short(abs(difference.mean))} {direction}"


def _signed(x: float) -> str:
    return f"{'+' if x > 0 else ''}{_short(x)}"


def _short(x: float) -> str:
    """Two digits: 0.0012, 120."""
    return f"{float(f'{x:.2g}'):g}"
