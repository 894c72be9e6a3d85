"""The code blocks of a text in Markdown, and how they are run."""

import pathlib
import re

from backends import BACKEND

REPOSITORY = pathlib.Path(__file__).parents[1]
README = REPOSITORY / "README.md"
PAGES = sorted(
    path
    for path in (REPOSITORY / "docs").rglob("*.md")
    if path.relative_to(REPOSITORY / "docs").parts[0] not in ("_build", "_generated")
)

# `<!-- backend: jax -->` stands above a block for that backend alone. What is "not run"
# takes several processes: the tests of the engines do that.
_BLOCK = re.compile(
    r"(?:<!-- backend: (?P<backend>\w+)(?P<not_run>, not run)? -->\n)?"
    r"```python\n(?P<code>.*?)```",
    re.DOTALL,
)


def blocks(path):
    """The blocks of Python in a text, in their order."""
    return list(_BLOCK.finditer(path.read_text()))


def run(path, after=lambda names: None):
    """Runs the blocks for this backend as one program; returns its names.

    Args:
        path: the text.
        after: is called with the names after each block.
    """
    names = {}
    for block in blocks(path):
        if block["backend"] in (None, BACKEND) and not block["not_run"]:
            exec(compile(block["code"], str(path), "exec"), names)
        after(names)
    return names
