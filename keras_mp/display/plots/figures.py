"""What all figures share: their style, and how they are saved and shown."""

import functools
import io
import os
import re
from collections.abc import Callable
from typing import Any

from matplotlib import rc_context, rcParams, style
from matplotlib.figure import Figure


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

    def draw(self, renderer: Any) -> None:
        """Draws it in our style too, as matplotlib makes the ticks only now."""
        fonts = {"svg.fonttype": rcParams["svg.fonttype"]}  # Of `svg_and_caption`.
        with style.context(["default", fonts]):
            super().draw(renderer)

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=80)  # About as large as inline figures.
        return out.getvalue()


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
