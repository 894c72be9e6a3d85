"""Draws gradients by their exponents, against what float16 holds."""

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from keras_mp.tools.display.plots.figures import Picture, our_style

_COLOURS = ("#0072B2", "#E69F00")  # Okabe and Ito's.
_LONGEST = 26  # Characters of a label: two stand beside each other above the axes.
# The exponents of float16's smallest, smallest normal, and largest number.
_LOWEST, _NORMAL, _HIGHEST = -24, -14, 15


@our_style
def plot_gradients(
    shares: Mapping[str, Mapping[int, float]],
    scale: float,
    outputs: Mapping[str, Mapping[int, float]] = MappingProxyType({}),
) -> Figure:
    """Draws histograms of exponents, and what float16 holds of them.

    Args:
        shares: label -> exponent e -> the share of the gradients, unscaled, whose
            magnitudes are from 2^e to 2^(e+1).
        scale: the loss scale.
        outputs: the same for outputs that overflow, drawn above the gradients, if any.

    Returns:
        A figure with a caption, on an Agg canvas, like figure 3 of Micikevicius et al.,
        Mixed Precision Training, 2018.
    """
    shift = math.floor(math.log2(scale))
    caption = (
        "Gradients by their exponents, and what float16 holds of them at a loss scale "
        f"of {scale:g} (2^{shift}): what is left of the yellow band becomes 0, what is "
        "right of the white band overflows."
    )
    title = f"Gradients in float16 at a loss scale of {scale:g}"
    if not outputs:
        figure = Picture(6, 4.4)
        _draw(figure.subplots(), shares, shift, "gradient, unscaled", title)
        return figure.captioned(caption, characters=85, inches=0.55)
    figure = Picture(6, 8.6)
    above, below = figure.subplots(2)
    _draw(above, outputs, 0, "output", "Outputs in float16: no loss scale moves them")
    _draw(below, shares, shift, "gradient, unscaled", title)
    caption = f"Above, outputs that overflow, as float32 computes them. {caption}"
    return figure.captioned(caption, characters=76, inches=0.85)


def _draw(
    axes: Axes,
    shares: Mapping[str, Mapping[int, float]],
    shift: int,
    what: str,
    title: str,
) -> None:
    """Draws histograms; a loss scale moves them by `shift` powers of two."""
    present = [exponent for share in shares.values() for exponent in share]
    low = min([*present, _LOWEST - shift]) - 3
    high = max([*present, _HIGHEST - shift]) + 3
    exponents = np.arange(low, high + 1)
    width = 0.8 / max(len(shares), 1)
    bars = [
        axes.bar(
            exponents + (index - (len(shares) - 1) / 2) * width,
            [100 * share.get(int(e), 0) for e in exponents],
            width,
            zorder=2,
            color=_COLOURS[index % len(_COLOURS)],
            label=_short(label),
        )
        for index, (label, share) in enumerate(shares.items())
    ]
    lowest, normal = _LOWEST - shift - 1.5, _NORMAL - shift - 0.5
    highest = _HIGHEST - shift + 0.5
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
    axes.set_xlabel(f"exponent e of the {what}: 2^e to 2^(e+1) (no unit)")
    axes.set_ylabel("share of the elements (%)")
    # The legend stands above the bars, which may reach anywhere.
    axes.set_title(title, pad=42)
    axes.legend(
        handles=[*bars, *bands],
        loc="lower center",
        bbox_to_anchor=(0.5, 1),
        ncols=3,
        fontsize=9,
        columnspacing=1,
        frameon=False,
    )


def _short(label: str) -> str:
    """The end of a long path, which fits beside others; the tables have all of it."""
    return label if len(label) <= _LONGEST else f"…{label[1 - _LONGEST :]}"
