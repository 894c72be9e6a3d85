"""A page of HTML in one file, and the same as a cell of a notebook.

A cell's style is for the cell alone, and it takes the notebook's own colours: its theme
is not that of the browser.
"""

import html
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from keras_mp_cli.missing import MissingPackageError

_CELL = (
    ".keras-mp{overflow-wrap:break-word}"
    ".keras-mp table{border-collapse:collapse}"
    ".keras-mp :is(td,th){padding:.2em .8em;vertical-align:top}"
    # JupyterLab's rule for all tables has more to say, and paths to the right read ill.
    ".keras-mp :is(td,th){text-align:left!important}"
    # Long paths break within a word, and so leave the other columns their room.
    ".keras-mp td:first-child{overflow-wrap:anywhere}"
    ".keras-mp tbody tr:nth-child(even){background:#8882}"
    ".keras-mp figure{margin:1.5em 0;max-width:48em}"
    ".keras-mp summary{cursor:pointer;padding:.3em 0}"
    # Its texts are black.
    ".keras-mp svg{width:100%;height:auto;background:#fff}"
    # On a telephone the path of a row has a line of its own.
    "@media(max-width:40em){"
    ".keras-mp table{font-size:.8em}"
    ".keras-mp tr{display:flex;flex-wrap:wrap}"
    ".keras-mp :is(td,th){flex:1;min-width:0;padding:.2em;box-sizing:border-box}"
    ".keras-mp :is(td,th):first-child{flex:0 0 100%}}"
)
_PAGE = (
    # The browser's own colours, bright or dark as its user likes them.
    ":root{color-scheme:light dark}"
    "body{font:15px/1.5 sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
)


def cell(heading: str, *parts: str) -> str:
    """What a notebook shows: parts, in HTML, below a heading in plain text."""
    return (
        f'<div class="keras-mp"><style>{_CELL}</style><h2>{html.escape(heading)}</h2>'
        f"{''.join(parts)}</div>"
    )


def items(sentences: Sequence[str]) -> str:
    """A list of sentences in plain text."""
    return f"<ul>{''.join(f'<li>{html.escape(s)}</li>' for s in sentences)}</ul>"


def folded(name: str, part: str) -> str:
    """HTML that is shown when its name, in plain text, is clicked."""
    return f"<details><summary>{html.escape(name)}</summary>{part}</details>"


def drawn(plot: Callable[[], Any]) -> str:
    """The figure that `plot()` draws, and below it in plain text what to see in it."""
    try:
        from keras_mp.display.plots import svg_and_caption

        svg, caption = svg_and_caption(plot())
    except MissingPackageError as error:
        return f"<p>No picture. {html.escape(str(error), quote=False)}</p>"
    return f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"


def write(path: str | os.PathLike[str], title: str, shown: str) -> None:
    """Writes a cell as a file of its own, which loads nothing from elsewhere."""
    pathlib.Path(path).write_text(
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        # Without it, telephones show a page that is 980 wide, made small.
        '<meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{_PAGE}</style></head>"
        f"<body>{shown}</body></html>",
        encoding="utf-8",
    )
