"""What all figures share: their style, and how they are saved and shown."""

import io
import math
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context, rcParams, style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.ticker import MaxNLocator

from keras_mp.tools.display import file

# A legend has no background of its own, so it follows the page.
_STYLE: list[Any] = ["default", {"legend.framealpha": 0.0}]
_BLACK, _PAGES = "#000000", "currentColor"

# Decorates a function, which then draws the same under any style that the user has set:
# captions name colours, and sizes are chosen to fit.
our_style = style.context(_STYLE)


class Picture(Figure):
    """A figure that notebooks show, whether or not they have imported pyplot yet."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), dpi=120)
        FigureCanvasAgg(self)

    def captioned(self, caption: str, characters: int, inches: float) -> Figure:
        """The figure with a caption below, in lines of that many characters."""
        text = textwrap.fill(caption, characters)
        self.text(0.015, 0.02, text, fontsize=9.5, va="bottom")
        self.tight_layout(rect=(0, inches / self.get_figheight(), 1, 1), w_pad=3)
        return self

    def draw(self, renderer: Any) -> None:
        """Draws in our style too, because matplotlib creates the ticks only now."""
        fonts = {"svg.fonttype": rcParams["svg.fonttype"]}  # From `svgs_and_caption`.
        with style.context([*_STYLE, fonts]):
            super().draw(renderer)

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=80)  # About as large as inline figures.
        return out.getvalue()


def draw_losses(
    axes: Axes,
    losses: Mapping[str, Sequence[Sequence[float]]],  # Policy -> seeds -> epochs.
    styles: Sequence[Mapping[str, Any]],  # One for each policy.
    what: str,
    unit: str,
) -> None:
    """Draws a line for each training, the epochs from left to right.

    Draws bars if there is only one epoch. A cross is where a training diverged.
    """
    every = [x for many in losses.values() for one in many for x in one]
    log = all(x > 0 for x in every if math.isfinite(x))
    if max((len(one) for many in losses.values() for one in many), default=0) > 1:
        _draw_lines(axes, losses, styles)
        axes.set_xlabel("epoch")
        axes.set_yscale("log" if log else "linear")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(handlelength=3.5)
    else:
        log = False
        _draw_bars(axes, losses, styles)
        name_policies(axes, [*losses])
    axes.set_title("Training loss under each policy")
    axes.set_ylabel(f"{what} ({unit}{', log scale' if log else ''})")
    axes.grid(alpha=0.3)


def _draw_lines(
    axes: Axes,
    losses: Mapping[str, Sequence[Sequence[float]]],
    styles: Sequence[Mapping[str, Any]],
) -> None:
    diverged = []
    for number, (policy, trainings) in enumerate(losses.items()):
        style = styles[number % len(styles)]
        for seed, loss in enumerate(trainings):
            label = "" if seed else policy
            axes.plot(range(1, len(loss) + 1), loss, label=label, **style)
            ended = next((i for i, x in enumerate(loss) if not math.isfinite(x)), None)
            if ended is not None:
                last = loss[ended - 1] if ended else math.nan
                diverged.append((ended + 1, last, style["color"]))
    # Beside the last loss that was finite; without any, at the top.
    top = max((y for _, y, _ in diverged if math.isfinite(y)), default=1.0)
    for epoch, y, colour in diverged:
        place = y if math.isfinite(y) else top
        axes.plot(epoch, place, "X", color=colour, markersize=10)
    if diverged:
        axes.plot([], [], "kX", linestyle="", label="no longer finite")


def _draw_bars(
    axes: Axes,
    losses: Mapping[str, Sequence[Sequence[float]]],
    styles: Sequence[Mapping[str, Any]],
) -> None:
    for number, trainings in enumerate(losses.values()):
        values = [loss[0] for loss in trainings if loss and math.isfinite(loss[0])]
        colour = styles[number % len(styles)]["color"]
        if values:
            axes.bar(number, sum(values) / len(values), 0.6, color=colour, alpha=0.6)
            axes.plot([number] * len(values), values, "o", color=colour)
        lost = len(trainings) - len(values)
        if lost:
            text = f"{lost} not finite" if values else "not finite"
            axes.annotate(text, (number, 0), ha="center", va="bottom")


def name_policies(axes: Axes, policies: Sequence[str]) -> None:
    """Writes the policies below an axis on which they are numbered from 0."""
    axes.set_xlabel("policy")
    axes.set_xticks(range(len(policies)), policies, rotation=15)
    axes.set_xlim(-0.5, len(policies) - 0.5)


def save_png(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes `figure` to `path` as a PNG, even if the name ends in something else."""
    out = io.BytesIO()
    figure.savefig(out, format="png")
    file.write(path, out.getvalue())


def svgs_and_caption(figure: Figure) -> tuple[list[str], str]:
    """`figure` as SVG and, as text, its caption, which is removed from the figure.

    Inside the SVG, the caption would shrink with the picture in a small window. Panels
    beside each other come twice, the second time one below the other, for a narrow
    window. Black becomes the page's text colour, and the background is the page's.
    """
    caption = " ".join(" ".join(t.get_text().split()) for t in figure.texts)
    for text in [*figure.texts]:
        text.remove()
    svgs = [_svg(figure, "wide")]
    number = len(figure.axes)
    if len({axes.get_position().y0 for axes in figure.axes}) == 1 < number:
        width, height = figure.get_size_inches()
        figure.set_size_inches(1.3 * width / number, height * number)
        places = GridSpec(number, 1)
        for index, axes in enumerate(figure.axes):
            axes.set_subplotspec(places[index])
        svgs.append(_svg(figure, "tall"))
    return svgs, caption


def _svg(figure: Figure, name: str) -> str:
    figure.tight_layout()
    # Two pictures in a page must not share their names.
    svg = svg_text(figure, salt=name)
    svg = svg.replace("<svg", f'<svg class="{name}" fill="{_PAGES}"', 1)
    # Its style is for `*`, and would apply to the whole page.
    svg = re.sub("<style.*?</style>", "", svg, flags=re.DOTALL)
    return svg.replace(_BLACK, _PAGES)


def svg_text(figure: Figure, salt: str) -> str:
    """`figure` as SVG, always the same for a salt, without a background.

    Its text stays text, which can be searched.
    """
    out = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(out, format="svg", metadata=nothing, transparent=True)
    return "<svg" + out.getvalue().partition("<svg")[2]
