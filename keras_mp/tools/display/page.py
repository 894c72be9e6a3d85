"""An HTML page in one file, and the same content as a notebook cell.

The style of a cell applies only to the cell, and takes the notebook's colours, because
its theme may differ from the browser's.
"""

import html
import os
from collections.abc import Callable, Sequence
from typing import Any

from keras_mp.errors import MissingPackageError
from keras_mp.tools.display import file

_CELL = (
    ".keras-mp{overflow-wrap:break-word}"
    ".keras-mp table{border-collapse:collapse}"
    ".keras-mp :is(td,th){padding:.2em .8em;vertical-align:top}"
    # JupyterLab aligns all tables to the right, where paths are hard to read.
    ".keras-mp :is(td,th){text-align:left!important}"
    # Long paths break within a word, so that the other columns keep their width.
    ".keras-mp td:first-child{overflow-wrap:anywhere}"
    ".keras-mp tbody tr:nth-child(even){background:#8882}"
    ".keras-mp figure{margin:1.5em 0;max-width:48em}"
    ".keras-mp summary{cursor:pointer;padding:.3em 0}"
    ".keras-mp svg{width:100%;height:auto}"
    ".keras-mp svg.tall{display:none}"
    # On a phone the path of a row has a line of its own.
    "@media(max-width:40em){"
    ".keras-mp svg.wide:has(+svg.tall){display:none}"
    ".keras-mp svg.tall{display:block}"
    ".keras-mp table{font-size:.8em}"
    ".keras-mp tr{display:flex;flex-wrap:wrap}"
    ".keras-mp :is(td,th){flex:1;min-width:0;padding:.2em;box-sizing:border-box}"
    ".keras-mp :is(td,th):first-child{flex:0 0 100%}}"
)
_PAGE = (
    # The browser's own colours, bright or dark.
    ":root{color-scheme:light dark}"
    "body{font:15px/1.5 sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
)


def cell(
    heading: str, sentences: Sequence[str], plot: Callable[[], Any], *tables: str
) -> str:
    """A notebook cell: plain text, the figure that `plot()` draws, tables in HTML."""
    said = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)
    return (
        f'<div class="keras-mp"><style>{_CELL}</style><h2>{html.escape(heading)}</h2>'
        f"<ul>{said}</ul>{_drawn(plot)}{''.join(tables)}</div>"
    )


def folded(name: str, part: str) -> str:
    """HTML that a click on its name, in plain text, opens."""
    return f"<details><summary>{html.escape(name)}</summary>{part}</details>"


def _drawn(plot: Callable[[], Any]) -> str:
    """A figure, with its caption in plain text below it."""
    try:
        from keras_mp.tools.display.plots import svgs_and_caption

        svgs, caption = svgs_and_caption(plot())
    except MissingPackageError as error:
        return f"<p>No picture. {html.escape(str(error), quote=False)}</p>"
    pictures = "".join(svgs)
    return f"<figure>{pictures}<figcaption>{html.escape(caption)}</figcaption></figure>"


def write(path: str | os.PathLike[str], title: str, shown: str) -> None:
    """Writes a cell as one file, which loads nothing from elsewhere."""
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        # Without it, phones shrink a page that is 980 pixels wide.
        '<meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{_PAGE}</style></head>"
        f"<body>{shown}</body></html>"
    )
    file.write(path, page.encode())
