"""Results as one HTML file that loads nothing from elsewhere."""

import html
import io
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:left}"
    "tr:nth-child(even){background:#f4f4f4}svg{max-width:100%;height:auto}"
)


def write_page(path: str | os.PathLike[str], title: str, body: str) -> None:
    """Writes a page of this title; `body` is HTML."""
    pathlib.Path(path).write_text(
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>"
        f"</head><body>{body}</body></html>",
        encoding="utf-8",
    )


def words(title: str, sentences: Sequence[str]) -> str:
    """A heading with a list of sentences, as HTML."""
    items = "".join(f"<li>{html.escape(s)}</li>" for s in sentences)
    return f"<h2>{html.escape(title)}</h2><ul>{items}</ul>"


def picture(plot: Callable[[], Any]) -> str:
    """The figure that `plot()` draws, as SVG; says so if there is no matplotlib."""
    try:
        figure = plot()
    except ImportError:
        return "<p>No picture: matplotlib is not installed.</p>"
    out = io.StringIO()
    figure.savefig(out, format="svg")
    return "<svg" + out.getvalue().partition("<svg")[2]
