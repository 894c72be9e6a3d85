"""Gradients by their exponents against what float16 holds, drawn."""

import math
import textwrap
from collections.abc import Mapping

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from keras_mp.diagnostics.diagnosis.ranges import FLOAT16, Range
from keras_mp.display.plots.figures import Picture, our_style

_COLOURS = ("#0072B2", "#E69F00")  # Okabe and Ito's.


@our_style
def plot_gradients(ranges: Mapping[str, Range], scale: float) -> Figure:
    """Draws histograms of exponents, and what float16 holds of them.

    Args:
        ranges: what the gradients are by -> their range, unscaled.
        scale: the loss scale.

    Returns:
        A figure with a caption, on an Agg canvas: what figure 3 of Micikevicius et al.,
        Mixed Precision Training, 2018, shows.
    """
    figure = Picture(figsize=(6, 4.4), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    shift = math.floor(math.log2(scale))
    present = [e for r in ranges.values() for e in r.histogram]
    low = min([*present, FLOAT16.lowest - shift]) - 3
    high = max([*present, FLOAT16.highest - shift]) + 3
    exponents = np.arange(low, high + 1)
    width = 0.8 / max(len(ranges), 1)
    bars = []
    for index, (name, found) in enumerate(ranges.items()):
        size = found.size or 1
        beyond = (found.nans + found.infinities) / size
        told = f", {beyond:.0%} are not finite" if beyond else ""
        bars.append(
            axes.bar(
                exponents + (index - (len(ranges) - 1) / 2) * width,
                [100 * found.histogram.get(int(e), 0) / size for e in exponents],
                width,
                zorder=2,
                color=_COLOURS[index % len(_COLOURS)],
                label=f"by {name} ({found.zeros / size:.0%} are 0{told})",
            )
        )
    lowest, normal = FLOAT16.lowest - shift - 1.5, FLOAT16.lowest_normal - shift - 0.5
    highest = FLOAT16.highest - shift + 0.5
    bands = [
        axes.axvspan(start, end, facecolor=colour, alpha=0.35, label=label)
        for start, end, colour, label in (
            (low, lowest, "#D55E00", "become 0"),
            (lowest, normal, "#F0E442", "lose bits"),
            (highest, high, "#CC79A7", "overflow"),
        )
    ]
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10]))
    axes.set_xlabel("exponent e of the gradient, unscaled: 2^e to 2^(e+1) (no unit)")
    axes.set_ylabel("share of the elements (%)")
    # The legend stands between it and the bars, which may reach anywhere.
    axes.set_title(f"Gradients in float16 at a loss scale of {scale:g}", pad=42)
    axes.legend(
        handles=[*bars, *bands],
        loc="lower center",
        bbox_to_anchor=(0.5, 1),
        ncols=3,
        fontsize=9,
        columnspacing=1,
        frameon=False,
    )
    caption = (
        "Gradients by their exponents, and what float16 holds of them at a loss scale "
        f"of {scale:g} (2^{shift}): what stands left of the yellow band becomes 0, "
        "what stands right of the white one overflows."
    )
    figure.text(0.02, 0.02, textwrap.fill(caption, 90), fontsize=9, va="bottom")
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    return figure
