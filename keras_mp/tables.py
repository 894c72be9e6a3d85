"""Tables, for a terminal and for a notebook."""

import html
import io
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from keras_mp.messages import visible

_LONGEST = (32, 28, 24, 20, 16, 12)  # Lines of a name, until the table fits.
_GAP = 2  # Between columns.


class Table:
    """Rows of text under a heading.

    Args:
        columns: the heading.
        rows: a text or number for each column; numbers are aligned to the right.
        title: a line above it.
        notes: lines below it.

    Without rows only title and notes are shown.
    """

    def __init__(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        title: str = "",
        notes: Sequence[str] = (),
    ) -> None:
        self.columns = tuple(columns)
        self.rows = [tuple(row) for row in rows]
        self.title = title
        self.notes = tuple(notes)

    def text(self, width: int = 80) -> str:
        """The table as lines of at most `width` characters."""
        # Imported here, because `import keras_mp` draws no table.
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        rows, widths = self._fitting(width)
        table = RichTable(
            box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
        )
        for index, column in enumerate(self.columns):
            right = bool(self.rows) and all(
                isinstance(row[index], (int, float)) for row in self.rows
            )
            table.add_column(
                Text(column),
                justify="right" if right else "left",
                overflow="fold",
                width=widths[index],
            )
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        out = io.StringIO()
        # In a notebook rich would show the table instead of returning it.
        console = Console(file=out, width=width, color_system=None, force_jupyter=False)

        def show(lines: Sequence[str]) -> None:
            for line in lines:
                # The lines of a list item are indented like its first.
                indent = "  " if line.startswith("- ") else ""
                # A path longer than the line stays one word, to be copied.
                filled = textwrap.fill(
                    line,
                    width,
                    subsequent_indent=indent,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
                console.print(Text(filled), soft_wrap=True)

        if self.title:
            show([*self.title.split("\n"), ""])
        if self.rows:
            console.print(table)
            show([""] if self.notes else [])
        show(self.notes)
        lines = visible(out.getvalue()).split("\n")
        return "\n".join(line.rstrip() for line in lines).rstrip("\n")

    def _fitting(self, width: int) -> tuple[list[list[str]], list[int]]:
        """The cells, long names in lines, and the widths of the columns."""
        for longest in _LONGEST:
            rows = [
                [_in_lines(str(cell), longest) for cell in row] for row in self.rows
            ]
            columns = [*zip(self.columns, *rows, strict=True)]
            words = [_longest(column, str.split) for column in columns]
            lines = [_longest(column, str.splitlines) for column in columns]
            left = width - _GAP * len(columns)
            if sum(words) <= left:
                break
        # The widest columns are wrapped first, but never within a word.
        for widest in range(width, 0, -1):
            widths = [
                min(line, max(word, widest))
                for word, line in zip(words, lines, strict=True)
            ]
            if sum(widths) <= left:
                break
        return rows, widths

    def markdown(self) -> str:
        """The table as Markdown, its title in bold."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        # A vertical bar would end the cell.
        cells = [[str(cell).replace("|", "\\|") for cell in line] for line in lines]
        return "\n\n".join(
            part
            for part in (
                f"**{self.title}**" if self.title else "",
                "\n".join(f"| {' | '.join(line)} |" for line in cells),
                *self.notes,
            )
            if part
        )

    def html(self) -> str:
        """The table as HTML, with nothing loaded from elsewhere."""
        head = "".join(f"<th>{html.escape(c)}</th>" for c in self.columns)
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in row) + "</tr>"
            for row in self.rows
        )
        title = f"<p><b>{html.escape(self.title)}</b></p>" if self.title else ""
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        return f"{title}{table if self.rows else ''}{notes}"


def _longest(column: Sequence[str], parts: Callable[[str], list[str]]) -> int:
    return max((len(part) for cell in column for part in parts(cell)), default=0)


def _in_lines(text: str, width: int) -> str:
    return re.sub(r"\S+", lambda word: "\n".join(folded(word[0], width)), text)


def folded(name: str, width: int) -> list[str]:
    """A long path or class name as several lines, broken where a word ends."""
    lines = [""]
    for part in re.findall(r".[^/_A-Z]*[/_]?", name):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return lines


def in_bytes(size: int | None, digits: int = 1) -> str:
    """A number of bytes with its unit, and this many digits after the point.

    "?" for None.
    """
    if size is None:
        return "?"
    if size < 1000:
        return f"{size} B"
    number, units = size / 1000, ["kB", "MB", "GB", "TB"]
    while number >= 999.95 and len(units) > 1:
        number /= 1000
        units.pop(0)
    return f"{number:.{digits}f} {units[0]}"
