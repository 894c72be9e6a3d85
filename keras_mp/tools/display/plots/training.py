"""Draws the loss of a training under several policies, and its loss scale."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from keras_mp.tools.display.plots.figures import Picture, draw_losses, our_style

# Broad to narrow, solid to dotted: curves that coincide can all be seen and can be
# distinguished without colour. The colours are Okabe and Ito's.
_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#56B4E9", "linewidth": 6.0, "linestyle": "-", "alpha": 0.6},
    {"color": "#D55E00", "linewidth": 2.2, "linestyle": "-"},
    {"color": "#000000", "linewidth": 1.4, "linestyle": (0, (2, 2))},
)


@our_style
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
    figure = Picture(11, 5)
    left, right = figure.subplots(1, 2)
    one_each = {policy: [loss] for policy, loss in losses.items()}
    draw_losses(left, one_each, _STYLES, "mean cross-entropy", "nats")
    _draw_scales(right, scales, skipped_steps)
    caption = f"{_losses_text(losses)} {_scales_text(scales, skipped_steps)}"
    return figure.captioned(caption, characters=160, inches=0.5)


def _draw_scales(
    axes: Axes, scales: Sequence[float], skipped_steps: Sequence[int]
) -> None:
    steps = range(1, len(scales) + 1)
    axes.plot(
        steps, scales, color="#D55E00", drawstyle="steps-post", label="loss scale"
    )
    if skipped_steps:
        # Drawn at the scale before the step, which overflowed; the first is unknown.
        at = [scales[max(step - 2, 0)] for step in skipped_steps]
        axes.plot(skipped_steps, at, "kx", label="skipped step")
        axes.legend()
    axes.set_title("Loss scale under mixed_float16")
    axes.set_xlabel("step")
    axes.set_ylabel("loss scale (no unit, log2 axis)")
    axes.set_yscale("log", base=2)
    if scales:
        # If the scale never moved, the axis would have no height.
        axes.set_ylim(min(scales) / 4, max(scales) * 4)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.7g}"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.grid(alpha=0.3)


def _losses_text(losses: Mapping[str, Sequence[float]]) -> str:
    last = [loss[-1] for loss in losses.values()]
    if not all(map(math.isfinite, last)):
        return "Left: a cross is where a training diverged."
    apart = (max(last) - min(last)) / max(last)
    near_0 = ", of a loss near 0" if max(last) < 0.05 else ""
    return (
        "Left: the curves should lie on each other; they end "
        f"{apart:.0%} apart{near_0}."
    )


def _scales_text(scales: Sequence[float], skipped_steps: Sequence[int]) -> str:
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
