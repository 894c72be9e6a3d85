"""The documentation's settings for Sphinx: `make docs` builds docs/_build/html."""

import os
import pathlib
import re
import shutil

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras_mp  # noqa: E402
from keras_mp.kernels.table import KERNELS  # noqa: E402
from keras_mp.repairs.table import REPAIRS  # noqa: E402
from keras_mp.replaced import REPLACED  # noqa: E402
from keras_mp.seams import OF_SHARDS, SEAMS  # noqa: E402
from keras_mp.tables import Table  # noqa: E402

DOCS = pathlib.Path(__file__).parent
GENERATED = DOCS / "_generated"
# A link in a checkout. A source distribution has none, and holds the notebooks once.
if not (DOCS / "notebooks").exists():
    shutil.copytree(DOCS.parent / "notebooks", DOCS / "notebooks")

project = "keras_mp"
release = keras_mp.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "_generated"]

myst_heading_anchors = 3  # Headings can be linked to.
# The stored output of a notebook is what its last run showed; tests run them.
nb_execution_mode = "off"

# Docstrings are Google's, with single backquotes for code.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_numpy_docstring = False

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["narrow.css"]
html_title = "keras_mp"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
copybutton_exclude = ".linenos, .gp"

_FENCE = re.compile(r"^( *)```python\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\(\s*(https?://[^\s)]+)\)")


def _markdown_as_rst(app, what, name, obj, options, lines) -> None:
    """Fenced code and links of a docstring, in Markdown, as reStructuredText."""

    def indented(match: re.Match) -> str:
        margin = match[1]
        code = [f"    {line}" if line else "" for line in match[2].split("\n")]
        return "\n".join([f"{margin}.. code-block:: python", "", *code])

    text = _FENCE.sub(indented, "\n".join(lines))
    lines[:] = _LINK.sub(r"`\1 <\2>`__", text).split("\n")


def _write_what_the_code_says(app) -> None:
    """What stays in float32, and what is wrapped or replaced, from the code itself."""
    rules = keras_mp.MixedFloat16().rules.table().markdown()
    seams = Table(
        ["Keras", "what the wrapper does"],
        [[_code(x.methods), x.does] for x in (*SEAMS, *OF_SHARDS)],
    )
    columns = ["operation", "backend", "what the wrapper does"]
    repairs = Table(columns, map(_row, REPAIRS))
    kernels = Table(
        [*columns, "what it gains", "private names"],
        [
            [*_row(x), x.gain, _code(n.replace(":", ".") for n in x.needs)]
            for x in KERNELS
        ],
    )
    replaced = "".join(f"- {what}\n" for what in REPLACED.values())
    GENERATED.mkdir(exist_ok=True)
    for name, text in {
        "rules": rules,
        "seams": seams.markdown(),
        "repairs": repairs.markdown(),
        "kernels": kernels.markdown(),
        "replaced": replaced,
    }.items():
        (GENERATED / f"{name}.md").write_text(f"{text}\n", encoding="utf-8")


def _code(names) -> str:
    return " ".join(f"`{name}`" for name in names)


def _row(row) -> list[str]:
    return [_code(row.operations.split()), row.backends, row.does]


def setup(app) -> None:
    # Before napoleon reads the sections.
    app.connect("autodoc-process-docstring", _markdown_as_rst, priority=1)
    app.connect("builder-inited", _write_what_the_code_says)
