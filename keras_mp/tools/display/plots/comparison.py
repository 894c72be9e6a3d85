"""Draws the same training under several policies."""

import math
import statistics
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from keras_mp.tools.display.plots.figures import (
    Picture,
    draw_losses,
    name_policies,
    our_style,
)

# Okabe and Ito's colours; lines and markers differ too, for readers without colours.
_COLOURS = ("#56B4E9", "#D55E00", "#000000", "#009E73", "#CC79A7", "#E69F00")
_COSTS = ("#009E73", "#CC79A7")
_MARKERS = "osD^vP"
_LINES = [
    {"color": colour, "linestyle": line, "alpha": 0.8}
    for colour, line in zip(_COLOURS, ("-", "--", ":", "-.", "-", "--"), strict=True)
]

# The median over the seeds, the lowest and the highest; None if not measured.
Ratio = tuple[float, float, float] | None


@our_style
def plot_comparison(
    losses: Mapping[str, Sequence[Sequence[float]]],
    metric: str,
    finals: Mapping[str, Sequence[float]],
    spread: float | None,
    ratios: Mapping[str, Mapping[str, Ratio]],
) -> Figure:
    """Draws the losses, a final metric, and speed and memory of several policies.

    Args:
        losses: policy -> for each seed, the training loss of each epoch.
        metric: the name of the metric.
        finals: policy -> the metric with each seed, the base first; nan for none.
        spread: how far the base's metric spreads over the seeds; None with one seed.
        ratios: "speed" or "peak memory" -> policy -> the multiple of the base's.

    Returns:
        A figure of three panels with a caption, on an Agg canvas.
    """
    base = next(iter(finals))
    figure = Picture(13, 5)
    left, middle, right = figure.subplots(1, 3)
    draw_losses(left, losses, _LINES, "mean of the epoch", "the loss's unit")
    _draw_finals(middle, metric, finals, spread)
    _draw_ratios(right, base, ratios)
    for axes in (middle, right):
        axes.grid(axis="y", alpha=0.3)
    caption = (
        "Training loss: one line for each training, or, with one epoch, a bar for each "
        "policy; lines of a seed should coincide, and a cross is where one diverged. "
        f"{metric.capitalize()}: one point for each training, joined by seed, and the "
        f"means; the band is the spread of {base} over the seeds: what another seed "
        f"changes. Speed and memory, as multiples of those under {base}, the dashed "
        "line: a faster step is above it, and less memory below it; the thin lines are "
        "the range over the seeds."
    )
    return figure.captioned(caption, characters=170, inches=0.8)


def _draw_finals(
    axes: Axes,
    metric: str,
    finals: Mapping[str, Sequence[float]],
    spread: float | None,
) -> None:
    means = {
        number: statistics.fmean(finite)
        for number, values in enumerate(finals.values())
        if (finite := [x for x in values if math.isfinite(x)])
    }
    if spread is not None:
        axes.axhspan(means[0] - spread, means[0] + spread, color="#F0E442", alpha=0.4)
    for one_seed in zip(*finals.values(), strict=True):
        axes.plot(range(len(one_seed)), one_seed, color="#999999", linewidth=0.8)
    for number, values in enumerate(finals.values()):
        axes.plot(
            [number] * len(values),
            values,
            linestyle="",
            marker=_MARKERS[number % len(_MARKERS)],
            color=_COLOURS[number % len(_COLOURS)],
        )
    for number, mean in means.items():
        axes.hlines(mean, number - 0.2, number + 0.2, color="#000000")
    name_policies(axes, [*finals])
    axes.set_title(f"{metric}, at the end")
    axes.set_ylabel(f"{metric} of the validation data (its own unit)")


def _draw_ratios(
    axes: Axes, base: str, ratios: Mapping[str, Mapping[str, Ratio]]
) -> None:
    width = 0.8 / len(ratios)
    for number, (cost, found) in enumerate(ratios.items()):
        left = (number - (len(ratios) - 1) / 2) * width
        measured = {x + left: ratio for x, ratio in enumerate(found.values()) if ratio}
        axes.bar(
            list(measured),
            [median for median, _, _ in measured.values()],
            width,
            label=cost if measured else f"{cost}: not measured",
            color=_COSTS[number],
            yerr=[
                [median - lowest for median, lowest, _ in measured.values()],
                [highest - median for median, _, highest in measured.values()],
            ],
            capsize=3,
        )
    axes.axhline(1, color="#000000", linewidth=1, linestyle="--", label=base)
    name_policies(axes, [*next(iter(ratios.values()))])
    axes.set_title("Speed and memory")
    axes.set_ylabel(f"times that of {base} (no unit)")
    # Room for the legend above the bars and their thin lines.
    axes.set_ylim(0, axes.get_ylim()[1] * 1.3)
    axes.legend(loc="upper left")
