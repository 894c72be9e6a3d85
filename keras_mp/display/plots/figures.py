"""What all figures share: their style, and how they are saved and shown."""

import functools
import io
import math
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib import rc_context, rcParams, style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


def our_style(plot: Callable[..., Figure]) -> Callable[..., Figure]:
    """Lets a function draw the same under any style that the user has set.

    Captions name colours, and sizes are made to fit.
    """

    @functools.wraps(plot)
    def drawn(*args: Any, **kwargs: Any) -> Figure:
        with style.context("default"):
            return plot(*args, **kwargs)

    return drawn


class Picture(Figure):
    """A figure that notebooks show, whether or not they have imported pyplot yet."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), dpi=120)
        FigureCanvasAgg(self)

    def captioned(self, caption: str, characters: int, inches: float) -> Figure:
        """The figure with a caption below, in lines of so many characters."""
        text = textwrap.fill(caption, characters)
        self.text(0.015, 0.02, text, fontsize=9.5, va="bottom")
        self.tight_layout(rect=(0, inches / self.get_figheight(), 1, 1), w_pad=3)
        return self

    def draw(self, renderer: Any) -> None:
        """Draws it in our style too, as matplotlib makes the ticks only now."""
        fonts = {"svg.fonttype": rcParams["svg.fonttype"]}  # Of `svg_and_caption`.
        with style.context(["default", fonts]):
            super().draw(renderer)

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=80)  # About as large as inline figures.
        return out.getvalue()


def draw_losses(
    axes: Axes,
    losses: Mapping[str, Sequence[Sequence[float]]],  # Policy -> seeds -> epochs.
    styles: Sequence[Mapping[str, Any]],  # Of the policies, in turn.
    what: str,
    unit: str,
) -> None:
    """Draws a line for each training, the epochs from left to right."""
    for number, (policy, trainings) in enumerate(losses.items()):
        for seed, loss in enumerate(trainings):
            style = {"marker": "o", **styles[number % len(styles)]}
            if len(loss) > 1:  # One point makes no line.
                style["marker"] = ""
            label = "" if seed else policy
            axes.plot(range(1, len(loss) + 1), loss, label=label, **style)
    every = [x for many in losses.values() for one in many for x in one]
    log = all(x > 0 for x in every if math.isfinite(x))
    axes.set_yscale("log" if log else "linear")
    axes.set_title("Training loss under each policy")
    axes.set_xlabel("epoch")
    axes.set_ylabel(f"{what} ({unit}{', log scale' if log else ''})")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(handlelength=3.5)


def save_png(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes `figure` to `path` as a PNG, also if the name ends in something else."""
    figure.savefig(path, format="png")


def svg_and_caption(figure: Figure) -> tuple[str, str]:
    """The SVG of `figure` and, as text, its caption, which is removed from the figure.

    Within the SVG, the caption would become as small as the window makes the picture.
    """
    caption = " ".join(" ".join(t.get_text().split()) for t in figure.texts)
    for text in [*figure.texts]:
        text.remove()
    figure.tight_layout()
    out = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.fonttype": "none"}):  # As text, which can be searched.
        figure.savefig(out, format="svg", metadata=nothing)
    svg = "<svg" + out.getvalue().partition("<svg")[2]
    # Its style is for `*`, and would apply to the whole page.
    return re.sub("<style.*?</style>", "", svg, flags=re.DOTALL), caption
