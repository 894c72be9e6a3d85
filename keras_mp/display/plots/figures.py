"""What every figure has in common: its style, and the ways out of it."""

import functools
import io
import os
import re
from collections.abc import Callable
from typing import Any

from matplotlib import rc_context, rcParams, style
from matplotlib.figure import Figure


def our_style(plot: Callable[..., Figure]) -> Callable[..., Figure]:
    """Lets a function draw alike under whatever style the user has chosen.

    Captions name colours, and sizes fit.
    """

    @functools.wraps(plot)
    def drawn(*args: Any, **kwargs: Any) -> Figure:
        with style.context("default"):
            return plot(*args, **kwargs)

    return drawn


class Picture(Figure):
    """A figure that notebooks show, whether or not they have imported pyplot yet."""

    def draw(self, renderer: Any) -> None:
        """Draws it in the style that it was made in: ticks are made only now."""
        fonts = {"svg.fonttype": rcParams["svg.fonttype"]}  # `svg_and_caption` says.
        with style.context(["default", fonts]):
            super().draw(renderer)

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=80)  # As large as inline ones, or nearly.
        return out.getvalue()


def save_png(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes `figure` to `path` as a PNG, whatever the name ends in."""
    figure.savefig(path, format="png")


def svg_and_caption(figure: Figure) -> tuple[str, str]:
    """What a page shows of `figure`: its SVG, and as a text its caption.

    In the picture, which it leaves, the caption would be as small as the window makes
    all of it.
    """
    caption = " ".join(" ".join(t.get_text().split()) for t in figure.texts)
    for text in [*figure.texts]:
        text.remove()
    figure.tight_layout()
    out = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.fonttype": "none"}):  # Texts as texts, to be read and found.
        figure.savefig(out, format="svg", metadata=nothing)
    svg = "<svg" + out.getvalue().partition("<svg")[2]
    # It is for `*`: within a page, for all that stands there.
    return re.sub("<style.*?</style>", "", svg, flags=re.DOTALL), caption
