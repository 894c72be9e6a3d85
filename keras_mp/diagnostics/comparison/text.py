"""What differs between trainings, in sentences and in the rows of a table."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence

from keras_mp.backends import engine
from keras_mp.diagnostics.comparison import spread
from keras_mp.diagnostics.comparison.outcomes import Outcomes
from keras_mp.diagnostics.comparison.spread import Difference, Ratio
from keras_mp.display.tables import Table, in_bytes


def sentences_on(found: Outcomes) -> list[str]:
    """What becomes of the metrics, what it costs, and what else there is to know."""
    base, *others = found.policies
    sentences = [*_diverged(found, base)]
    for policy in others:
        sentences += _diverged(found, policy)
        if judged := list(_judged(found, policy)):
            sentences.append(f"{policy}: {'; '.join(judged)}.")
    sentences.append(
        _cost("Time per step", base, {p: found.time(p) for p in others})
        or "Time per step was not measured: it takes more steps, or a second epoch."
    )
    sentences.append(
        _cost("Peak memory", base, {p: found.memory(p) for p in others})
        or f"Peak memory was not measured: {engine.why_no_memory}."
    )
    for policy in found.policies:
        if skips := sum(t.skipped_steps or 0 for t in found.of(policy)):
            sentences.append(f"{policy} skipped {skips} steps.")
    return [*sentences, *found.notes]


def _diverged(found: Outcomes, policy: str) -> Iterator[str]:
    diverged = [t.diverged for t in found.of(policy) if t.diverged]
    if diverged:
        seeds = in_seeds(len(found.seeds))
        yield f"{policy} diverged with {len(diverged)} of {seeds}: {diverged[0]}."


def _judged(found: Outcomes, policy: str) -> Iterator[str]:
    """A policy's metrics in words, what differs most first."""
    differences = {m: found.difference(policy, m) for m in found.metrics}
    seeds = in_seeds(len(found.seeds))

    def by_verdict(verdict: str) -> dict[str, Difference]:
        return {m: d for m, d in differences.items() if d.verdict == verdict}

    for metric, d in by_verdict(spread.BEYOND).items():
        beyond = f"beyond the spread over {seeds} ({_short(d.spread)})"
        yield f"{metric} is {_by(d)}, {beyond}"
    for metric, d in by_verdict(spread.UNCLEAR).items():
        beyond = f"more than the spread over {seeds} ({_short(d.spread)})"
        yield f"{metric} is {_by(d)}, {beyond}, but not with each: more would tell"
    for metric, d in by_verdict(spread.NO_SPREAD).items():
        yield f"{metric} is {_by(d)}, and one seed has no spread"
    if within := _list(by_verdict(spread.WITHIN)):
        yield f"{within} within the spread over {seeds}"
    if same := _list(by_verdict(spread.SAME)):
        yield f"{same} the same as under {found.policies[0]}"


def _cost(what: str, base: str, ratios: dict[str, Ratio | None]) -> str:
    told = ", ".join(f"{policy} {ratio}" for policy, ratio in ratios.items() if ratio)
    return f"{what}, in that of {base}: {told}." if told else ""


def table_of(found: Outcomes, title: str = "") -> Table:
    """One row for each policy in each of the things that are told."""
    base, *_ = found.policies
    columns = ("what", "policy", "mean ± spread", f"against {base}")
    rows = [
        (what if policy == base else "", policy, told, "" if policy == base else versus)
        for what, cells in _cells(found)
        for policy, (told, versus) in zip(found.policies, cells, strict=True)
    ]
    return Table(columns, rows, title)


def _cells(found: Outcomes) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """What is told, and of each policy two cells."""
    for metric in found.metrics:
        yield metric, [_metric(found, p, metric) for p in found.policies]
    if any(t.diverged for t in found.trainings):
        counts = [sum(bool(t.diverged) for t in found.of(p)) for p in found.policies]
        seeds = in_seeds(len(found.seeds))
        yield "diverged", [(f"{count} of {seeds}", "") for count in counts]
    yield "time per step", [_time(found, p) for p in found.policies]
    yield "peak memory", [_memory(found, p) for p in found.policies]
    yield "skipped steps", [(_skips(found, p), "") for p in found.policies]


def _metric(found: Outcomes, policy: str, metric: str) -> tuple[str, str]:
    difference = found.difference(policy, metric)
    alone = difference.verdict in (spread.SAME, spread.NOTHING)
    sign = "+" if difference.mean > 0 else ""
    by = "" if alone else f"{sign}{_short(difference.mean)}, "
    return _mean_and_spread(found.values(policy, metric)), by + difference.verdict


def _time(found: Outcomes, policy: str) -> tuple[str, str]:
    seconds = [t.seconds_per_step for t in found.of(policy)]
    told = _mean_and_spread([1000 * x for x in seconds if x])
    return f"{told} ms" if told else "not measured", _versus(found.time(policy))


def _memory(found: Outcomes, policy: str) -> tuple[str, str]:
    peaks = [t.peak_memory for t in found.of(policy) if t.peak_memory is not None]
    told = in_bytes(round(statistics.fmean(peaks))) if peaks else "not measured"
    return told, _versus(found.memory(policy))


def _skips(found: Outcomes, policy: str) -> str:
    skips = [t.skipped_steps for t in found.of(policy) if t.skipped_steps is not None]
    if not skips:
        return "no loss scale"
    low, high = min(skips), max(skips)
    return f"{low}" if low == high else f"{low} to {high}"


def _versus(ratio: Ratio | None) -> str:
    return str(ratio) if ratio else ""


def _mean_and_spread(values: Sequence[float]) -> str:
    finite = [x for x in values if math.isfinite(x)]
    if not finite:
        return ""
    size = spread.spread_of(finite)
    told = f"{statistics.fmean(finite):.4g}"
    return told if size is None else f"{told} ± {_short(size)}"


def _by(difference: Difference) -> str:
    return (
        f"{_short(abs(difference.mean))} {'higher' if difference.mean > 0 else 'lower'}"
    )


def _short(x: float | None) -> str:
    """Two digits: 0.0012, 120."""
    return f"{float(f'{x:.2g}'):g}"


def in_seeds(count: int) -> str:
    """So many seeds, in words."""
    return f"{count} seed{'s' if count > 1 else ''}"


def _list(names: Iterable[str]) -> str:
    *more, last = names or [""]
    return f"{', '.join(more)} and {last} are" if more else f"{last} is" if last else ""
