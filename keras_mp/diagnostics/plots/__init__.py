"""Pictures of trainings and of ranges: the only folder that imports matplotlib.

Figures are built without `pyplot`, so that drawing one neither opens a window nor
changes what a notebook or a script has set up for itself.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from keras_mp.diagnostics.ranges import FLOAT16, Range

# Broad to narrow, solid to dotted: curves that coincide can all be seen, and told
# apart without colour. The colours are Okabe and Ito's.
_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#56B4E9", "linewidth": 6.0, "linestyle": "-", "alpha": 0.6},
    {"color": "#D55E00", "linewidth": 2.2, "linestyle": "-"},
    {"color": "#000000", "linewidth": 1.4, "linestyle": (0, (2, 2))},
)
_COLOURS = ("#0072B2", "#E69F00")  # Okabe and Ito's.


def plot_training(
    losses: Mapping[str, Sequence[float]],
    scales: Sequence[float],
    skipped_steps: Sequence[int] = (),
) -> Figure:
    """Draws the loss of several policies, and the loss scale of one of them.

    Args:
        losses: policy name -> mean training loss of each epoch, in nats.
        scales: the loss scale after each step, the first step first.
        skipped_steps: the steps, counted from 1, whose gradients were not finite.

    Returns:
        A figure of two panels with a caption, on an Agg canvas.

    Example:
        >>> figure = plot_training({"float32": [2.1, 0.4]}, [32768.0] * 100)
        >>> save_png(figure, "training.png")
    """
    figure = Figure(figsize=(11, 5), dpi=120)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw_losses(left, losses)
    _draw_scales(right, scales, skipped_steps)
    caption = f"{_say_losses(losses)} {_say_scales(scales, skipped_steps)}"
    figure.text(0.015, 0.03, textwrap.fill(caption, 160), fontsize=9.5, va="bottom")
    figure.tight_layout(rect=(0, 0.1, 1, 1), w_pad=3)
    return figure


def save_png(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes `figure` to `path` as a PNG, whatever the name ends in."""
    figure.savefig(path, format="png")


def _draw_losses(axes: Axes, losses: Mapping[str, Sequence[float]]) -> None:
    for number, (name, loss) in enumerate(losses.items()):
        style = _STYLES[number % len(_STYLES)]
        marker = "o" if len(loss) == 1 else ""  # a line through one point is nothing
        epochs = range(1, len(loss) + 1)
        axes.plot(epochs, loss, label=name, marker=marker, **style)
    axes.set_title("Training loss under each policy")
    axes.set_xlabel("epoch")
    axes.set_ylabel("mean cross-entropy (nats, log scale)")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(handlelength=3.5)


def _draw_scales(
    axes: Axes, scales: Sequence[float], skipped_steps: Sequence[int]
) -> None:
    steps = range(1, len(scales) + 1)
    axes.plot(
        steps, scales, color="#D55E00", drawstyle="steps-post", label="loss scale"
    )
    if skipped_steps:
        # At the scale that overflowed: the one before the step, where that is known.
        at = [scales[max(step - 2, 0)] for step in skipped_steps]
        axes.plot(skipped_steps, at, "kx", label="skipped step")
        axes.legend()
    axes.set_title("Loss scale under mixed_float16")
    axes.set_xlabel("step")
    axes.set_ylabel("loss scale (no unit, log2 axis)")
    axes.set_yscale("log", base=2)
    if scales:
        # A scale that never moved would sit on an axis of no height.
        axes.set_ylim(min(scales) / 4, max(scales) * 4)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.7g}"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.grid(alpha=0.3)


def _say_losses(losses: Mapping[str, Sequence[float]]) -> str:
    last = [loss[-1] for loss in losses.values()]
    apart = (max(last) - min(last)) / max(last)
    return (
        f"Left: the curves should lie on each other; they end {apart:.0%} apart, "
        "of a loss near 0."
        if max(last) < 0.05
        else f"Left: the curves should lie on each other; they end {apart:.0%} apart."
    )


def _say_scales(scales: Sequence[float], skipped_steps: Sequence[int]) -> str:
    if not scales:
        return "Right: no policy used a loss scale."
    pairs = zip(scales, scales[1:], strict=False)
    growths = [step for step, (old, new) in enumerate(pairs, start=2) if new > old]
    skipped = (
        "It backs off where gradients overflow (crosses, skipped steps: "
        f"{len(skipped_steps)})"
        if skipped_steps
        else "It never backs off, as no gradient overflowed"
    )
    grown = (
        f"grows after enough finite steps in a row (first at step {growths[0]:,})"
        if growths
        else "never grows, as there were not enough finite steps in a row"
    )
    return f"Right: the loss scale. {skipped}, and {grown}."


def plot_gradients(ranges: Mapping[str, Range], scale: float) -> Figure:
    """Draws histograms of exponents, and what float16 holds of them.

    Args:
        ranges: what the gradients are by -> their range, unscaled.
        scale: the loss scale.

    Returns:
        A figure with a caption, on an Agg canvas: what figure 3 of Micikevicius et al.,
        Mixed Precision Training, 2018, shows.
    """
    figure = Figure(figsize=(9, 5), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    shift = math.floor(math.log2(scale))
    present = [e for r in ranges.values() for e in r.histogram]
    low = min([*present, FLOAT16.lowest - shift]) - 2
    high = max([*present, FLOAT16.highest - shift]) + 2
    exponents = np.arange(low, high + 1)
    width = 0.8 / max(len(ranges), 1)
    for index, (name, found) in enumerate(ranges.items()):
        shares = [
            100 * found.histogram.get(int(e), 0) / (found.size or 1) for e in exponents
        ]
        axes.bar(
            exponents + (index - (len(ranges) - 1) / 2) * width,
            shares,
            width,
            zorder=2,
            color=_COLOURS[index % len(_COLOURS)],
            label=f"gradients by {name} ({found.zeros / (found.size or 1):.0%} are 0)",
        )
    lowest, normal = FLOAT16.lowest - shift, FLOAT16.lowest_normal - shift
    axes.axvspan(low, lowest - 1.5, color="#D55E00", alpha=0.15, label="become 0")
    axes.axvspan(
        lowest - 1.5, normal - 0.5, color="#F0E442", alpha=0.25, label="subnormal"
    )
    axes.axvspan(
        FLOAT16.highest - shift + 0.5,
        high,
        color="#CC79A7",
        alpha=0.25,
        label="overflow",
    )
    axes.set_xlim(low, high)
    axes.set_xlabel("exponent e of the unscaled gradient: 2^e to 2^(e+1)")
    axes.set_ylabel("share of the elements (%)")
    axes.legend(loc="best", fontsize=8)
    caption = (
        "Gradients by their exponents, and what float16 holds of them at a loss scale "
        f"of {scale:g} (2^{shift}): what stands left of the yellow band becomes 0, "
        "what stands right of the white one overflows."
    )
    figure.text(0.02, 0.02, textwrap.fill(caption, 120), fontsize=9, va="bottom")
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    return figure
