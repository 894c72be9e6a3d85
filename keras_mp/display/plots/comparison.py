"""The same training under several policies, drawn."""

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from keras_mp.diagnostics.comparison.spread import Ratio, spread_of
from keras_mp.display.plots.figures import Picture, our_style

# Okabe and Ito's colours; with the lines and markers they are told apart without.
_COLOURS = ("#56B4E9", "#D55E00", "#000000", "#009E73", "#CC79A7", "#E69F00")
_COSTS = ("#009E73", "#CC79A7")
_LINES = ("-", "--", ":", "-.")
_MARKERS = "osD^vP"


@our_style
def plot_comparison(
    losses: Mapping[str, Sequence[Sequence[float]]],
    metric: str,
    finals: Mapping[str, Sequence[float]],
    ratios: Mapping[str, Mapping[str, Ratio | None]],
) -> Figure:
    """Draws the losses, a final metric, and time and memory of several policies.

    Args:
        losses: policy -> of each seed the training loss of each epoch.
        metric: the name of the metric.
        finals: policy -> the metric with each seed, the base first; nan for none.
        ratios: what -> policy -> how many times that of the base; None for none.

    Returns:
        A figure of three panels with a caption, on an Agg canvas.
    """
    base = next(iter(finals))
    figure = Picture(figsize=(13, 5), dpi=120)
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    _draw_losses(left, losses)
    _draw_finals(middle, metric, finals)
    _draw_ratios(right, base, ratios)
    caption = (
        "Left: one line for each training; those of a seed should lie on each other. "
        "Middle: one point for each training, joined by seed, and their means; a mean "
        f"off the band, which is the spread of {base} over the seeds, is further off "
        f"than another seed would be. Right: below the dashed line is less than under "
        f"{base}; the thin lines are the range over the seeds."
    )
    figure.text(0.015, 0.03, textwrap.fill(caption, 185), fontsize=9.5, va="bottom")
    figure.tight_layout(rect=(0, 0.12, 1, 1), w_pad=3)
    return figure


def _draw_losses(axes: Axes, losses: Mapping[str, Sequence[Sequence[float]]]) -> None:
    for number, (policy, trainings) in enumerate(losses.items()):
        for seed, loss in enumerate(trainings):
            axes.plot(
                range(1, len(loss) + 1),
                loss,
                label="" if seed else policy,
                color=_COLOURS[number % len(_COLOURS)],
                linestyle=_LINES[number % len(_LINES)],
                marker=_MARKERS[number % len(_MARKERS)] if len(loss) == 1 else "",
                alpha=0.8,
            )
    axes.set_title("Training loss")
    axes.set_xlabel("epoch")
    every = [x for many in losses.values() for one in many for x in one]
    log = all(x > 0 for x in every if math.isfinite(x))
    axes.set_yscale("log" if log else "linear")
    axes.set_ylabel(f"mean of the epoch (the loss's unit{', log scale' * log})")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(handlelength=3.5)


def _draw_finals(
    axes: Axes, metric: str, finals: Mapping[str, Sequence[float]]
) -> None:
    means = {
        number: statistics.fmean(finite)
        for number, values in enumerate(finals.values())
        if (finite := [x for x in values if math.isfinite(x)])
    }
    size = spread_of(next(iter(finals.values())))
    if size is not None:
        axes.axhspan(means[0] - size, means[0] + size, color="#F0E442", alpha=0.4)
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
    _name(axes, list(finals))
    axes.set_title(f"{metric}, at the end")
    axes.set_ylabel(f"{metric} of the validation data (its own unit)")


def _draw_ratios(
    axes: Axes, base: str, ratios: Mapping[str, Mapping[str, Ratio | None]]
) -> None:
    width = 0.8 / len(ratios)
    for number, (what, found) in enumerate(ratios.items()):
        left = (number - (len(ratios) - 1) / 2) * width
        measured = {x + left: r for x, r in enumerate(found.values()) if r}
        axes.bar(
            list(measured),
            [r.median for r in measured.values()],
            width,
            label=what if measured else f"{what}: not measured",
            color=_COSTS[number],
            yerr=[
                [r.median - r.lowest for r in measured.values()],
                [r.highest - r.median for r in measured.values()],
            ],
            capsize=3,
        )
    axes.axhline(1, color="#000000", linewidth=1, linestyle="--", label=base)
    _name(axes, list(next(iter(ratios.values()))))
    axes.set_title("Time and memory")
    axes.set_ylabel(f"times that of {base} (no unit)")
    # Above the bars: their thin lines stay in sight.
    axes.set_ylim(0, axes.get_ylim()[1] * 1.3)
    axes.legend(loc="upper left")


def _name(axes: Axes, policies: Sequence[str]) -> None:
    axes.set_xlabel("policy")
    axes.set_xticks(range(len(policies)), policies, rotation=15)
    axes.set_xlim(-0.5, len(policies) - 0.5)
    axes.grid(axis="y", alpha=0.3)
