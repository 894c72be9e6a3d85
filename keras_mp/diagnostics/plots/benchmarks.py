"""What loss scaling costs, drawn."""

import textwrap
from collections.abc import Mapping, Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from keras_mp.diagnostics.plots.figures import Picture, our_style

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
    """Draws how many times as long a step takes with loss scaling.

    Args:
        ratios: case -> peer -> the median and the quartiles below and above it.
        unclear: the cases that are inconclusive; drawn pale.

    Returns:
        A figure with a caption, on an Agg canvas.
    """
    figure = Picture(figsize=(10, 1.8 + 0.55 * len(ratios)), dpi=120)
    FigureCanvasAgg(figure)
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
    axes.invert_yaxis()
    axes.set_xscale("log")
    highest = max(
        (q[2] for found in ratios.values() for q in found.values()), default=2
    )
    lowest = min((q[1] for found in ratios.values() for q in found.values()), default=1)
    marks = [0.9, 1, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100]
    shown = [m for m in marks if 0.95 * lowest <= m <= 1.05 * highest]
    axes.set_xticks(shown, [f"{m:g}" for m in shown])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("step time over the same step without loss scaling (no unit, log)")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    caption = (
        "The nearer to the dashed line the better: there a step takes as long as one "
        "that does not scale. Medians over pairs of stretches of steps, right after "
        "each other; the thin lines are the quartiles. Pale: inconclusive, a "
        "second copy of the unscaled step was off as well."
    )
    figure.text(0.015, 0.02, textwrap.fill(caption, 150), fontsize=9.5, va="bottom")
    figure.tight_layout(rect=(0, 0.75 / figure.get_figheight(), 1, 1))
    return figure
