"""Tables, for a terminal and for a notebook."""

import html
import io
import textwrap
from collections.abc import Sequence
from typing import Any

_SHORT = 10  # A text of up to so many characters stays in one line.


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
        # Imported here, as `import keras_mp` draws no table.
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
        )
        for index, column in enumerate(self.columns):
            right = bool(self.rows) and all(
                isinstance(row[index], (int, float)) for row in self.rows
            )
            cells = [str(row[index]) for row in self.rows]
            table.add_column(
                Text(column),
                justify="right" if right else "left",
                overflow="fold",
                no_wrap=all(len(x) <= _SHORT for x in "\n".join(cells).split("\n")),
            )
        for row in self.rows:
            table.add_row(*(Text(str(cell)) for cell in row))
        out = io.StringIO()
        # In a notebook rich would show the table instead of returning it.
        console = Console(file=out, width=width, color_system=None, force_jupyter=False)

        def show(lines: Sequence[str]) -> None:
            for line in lines:
                # The lines of a list item are indented like its first.
                indent = "  " if line.startswith("- ") else ""
                filled = textwrap.fill(line, width, subsequent_indent=indent)
                console.print(Text(filled))

        if self.title:
            show([*self.title.split("\n"), ""])
        if self.rows:
            console.print(table)
            show([""] if self.notes else [])
        show(self.notes)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

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


def in_bytes(size: int | None, digits: int = 1) -> str:
    """A number of bytes with its unit, and so many digits after the point.

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
