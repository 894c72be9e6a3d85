"""What every figure has in common: its style, and the ways out of it."""

import io
import os
import re

from matplotlib import rc_context, style
from matplotlib.figure import Figure

# Captions name colours, and sizes fit: under whatever style the user has chosen.
our_style = style.context("default")


class Picture(Figure):
    """A figure that notebooks show, whether or not they have imported pyplot yet."""

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png")
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
