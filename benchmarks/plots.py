"""The pictures of the suites `cost` and `train`."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from keras_mp.tools.display.plots.figures import Picture, our_style

_COLOURS = {
    "keras_mp": "#009E73",
    "keras": "#D55E00",
    "optax": "#56B4E9",
    "flax": "#E69F00",
    "jmp": "#CC79A7",
    "mpx": "#F0E442",
    "torch.amp": "#0072B2",
}
_MARKERS = "osD^vP*"


@our_style
def plot_cost(
    ratios: Mapping[str, Mapping[str, tuple[float, float, float]]],
    unclear: Sequence[str],
) -> Figure:
    """Draws the time of a step with loss scaling over the time of one without.

    Args:
        ratios: case -> peer -> the median and the quartiles below and above it.
        unclear: the inconclusive cases, drawn pale.

    Returns:
        A figure with a caption, on an Agg canvas.
    """
    figure = Picture(10, 1.8 + 0.55 * len(ratios))
    axes = figure.subplots()
    peers = list(dict.fromkeys(p for found in ratios.values() for p in found))
    for number, peer in enumerate(peers):
        drawn = [(y, c, found[peer]) for y, (c, found) in enumerate(ratios.items())
                 if peer in found]  # fmt: skip
        for y, case, (median, lower, upper) in drawn:
            axes.errorbar(
                median,
                y + 0.6 * (number + 0.5) / len(peers) - 0.3,
                xerr=[[median - lower], [upper - median]],
                marker=_MARKERS[number % len(_MARKERS)],
                color=_COLOURS.get(peer, "#000000"),
                alpha=0.35 if case in unclear else 1,
                linestyle="",
                capsize=2,
                label=peer if y == drawn[0][0] else "",
            )
    axes.axvline(1, color="#000000", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(ratios)), list(ratios))
    axes.set_ylim(len(ratios) - 0.5, -0.5)
    axes.set_xscale("log")
    highest = max(
        (q[2] for found in ratios.values() for q in found.values()), default=2
    )
    lowest = min((q[1] for found in ratios.values() for q in found.values()), default=1)
    marks = [0.8, 1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100]
    shown = [m for m in marks if 0.95 * lowest <= m <= 1.05 * highest]
    axes.set_xticks(shown, [f"{m:g}" for m in shown])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("step time over the same step without loss scaling (no unit, log)")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure.captioned(
        "The nearer to the dashed line the better: there a step takes as long as one "
        "that does not scale. Medians over pairs of stretches of steps, right after "
        "each other; the thin lines are the quartiles. Pale: inconclusive, a "
        "second copy of the unscaled step was off as well.",
        characters=130,
        inches=0.75,
    )


@our_style
def plot_train(ratios: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Figure:
    """Draws the speed and the memory of each precision over those of float32.

    Args:
        ratios: "speed-up" or "memory" -> network -> precision -> ratio.

    Returns:
        A figure of two panels with a caption, on an Agg canvas.
    """
    rows = list(dict.fromkeys(row for found in ratios.values() for row in found))
    figure = Picture(11, 2 + 0.5 * len(rows))
    panels = figure.subplots(1, len(ratios), sharey=True)
    colours = ("#56B4E9", "#D55E00", "#009E73", "#E69F00")
    for axes, (what, found) in zip(panels, ratios.items(), strict=True):
        names = list(dict.fromkeys(n for of in found.values() for n in of))
        height = 0.8 / max(len(names), 1)
        for number, name in enumerate(names):
            bars = {y: found[row][name] for y, row in enumerate(rows)
                    if name in found.get(row, {})}  # fmt: skip
            axes.barh(
                [y + (number + 0.5) * height - 0.4 for y in bars],
                list(bars.values()),
                height,
                color=colours[number % len(colours)],
                label=name,
            )
        axes.axvline(1, color="#000000", linewidth=1, linestyle="--")
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_title(what if names else f"{what}: not measured")
        axes.set_xlabel("times that of float32, with TF32 on a GPU (no unit)")
        axes.grid(axis="x", alpha=0.3)
    panels[0].legend()
    return figure.captioned(
        "Left: examples per second; right of the dashed line is faster than float32. "
        "Right: the most memory that a step takes; left of the line is less.",
        characters=140,
        inches=0.6,
    )
