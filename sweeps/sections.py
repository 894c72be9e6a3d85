"""Writes README.md, a section for each sweep."""

import pathlib
import re

README = pathlib.Path(__file__).parent / "README.md"


def write_section(title: str, text: str) -> None:
    """Replaces the section `title` of README.md, or adds it at the end.

    Args:
        title: the text after `## `.
        text: the rest of the section, in Markdown, without headings of that level.
    """
    present = README.read_text() if README.exists() else "# Sweeps\n"
    head, *sections = re.split(r"^(?=## )", present, flags=re.MULTILINE)
    section = f"## {title}\n\n{text.strip()}\n"
    titles = [s.partition("\n")[0] for s in sections]
    if f"## {title}" in titles:
        sections[titles.index(f"## {title}")] = section
    else:
        sections.append(section)
    README.write_text("\n".join(s.rstrip("\n") + "\n" for s in [head, *sections]))
