"""The picture of README: results of whole trainings, over those in float32."""

import statistics
from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.quality.quality_tables import KERAS
from benchmarks.results import Record
from keras_mp.tools.display.plots.figures import svg_text

_ROWS = {
    "one-bad-image": "one image of 1438\non another scale,\naccuracy",
    "many-classes": "30,000 classes,\ntwo epochs,\naccuracy",
    "regression": "targets past 65504,\n1 / error",
}
# How they are trained: the bar's colour, and its name.
_WAYS = {
    "mixed_float16": ("#009E73", "keras_mp mixed_float16"),
    "bfloat16": ("#56B4E9", "keras_mp bfloat16"),
    f"{KERAS}mixed_float16": ("#D55E00", "Keras' own mixed_float16"),
}
_HEIGHT = 0.26


def svg(records: Sequence[Record], dark: bool) -> str:
    """The picture as SVG, transparent, for a light or a dark page.

    Args:
        records: of the suite, on JAX.
        dark: whether its text is light.
    """
    found = {(r["case"], r["way"]): r["values"] for r in records if r.get("values")}
    colour = "#e6edf3" if dark else "#1f2328"
    settings = {
        "font.size": 11,
        **dict.fromkeys(
            ("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), colour
        ),
    }
    with rc_context(settings):
        return svg_text(_draw(found, colour), salt="keras_mp")


def _draw(found: dict[tuple[str, str], list[float | None]], colour: str) -> Figure:
    figure = Figure(figsize=(6.5, 4.4), layout="constrained")
    axes = figure.subplots()
    for row, case in enumerate(_ROWS):
        for place, (way, (bar, name)) in enumerate(_WAYS.items()):
            share, lost = _share(case, found[case, way], found[case, "float32"])
            y = row + _HEIGHT * (place - 1)
            axes.barh(y, share, _HEIGHT * 0.9, color=bar)
            failed = f", {lost} of {len(found[case, way])} not finite" if lost else ""
            inside = share > 0.6
            axes.text(
                0.02 if inside else share + 0.02,
                y,
                f"{name}{failed}",
                va="center",
                color="#000000" if inside else colour,
                fontsize=9.5,
            )
            number = "nan" if lost == len(found[case, way]) else f"{share:.2f}"
            axes.text(1.08, y, number, va="center", ha="right", fontsize=9.5)
    axes.axvline(1, color=colour, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(_ROWS)), _ROWS.values())
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1)
    axes.set_xlabel("result over that of float32: 1 is as good")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure


def _share(
    case: str, values: Sequence[float | None], base: Sequence[float | None]
) -> tuple[float, int]:
    """The mean result over float32's, the larger the better; and how many are lost."""
    finite = [v for v in values if v is not None]
    if not finite:
        return 0.0, len(values)
    ratio = statistics.fmean(finite) / statistics.fmean(
        v for v in base if v is not None
    )
    return (1 / ratio if case == "regression" else ratio), len(values) - len(finite)
