"""Private names of Keras and of the frameworks stand in files of their own.

A private name may be used in the file that defines it, for that makes it ours. What is
left belongs to another library, and its next release may move it.
"""

import ast
import re
from collections.abc import Iterator

import pytest
from workplace import ROOT

once = pytest.mark.once("It reads the source.")
FILES = [
    path
    for folder in ("keras_mp", "keras_mp_cli", "benchmarks", "sweeps")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
PRIVATE = re.compile(r"_[a-zA-Z]\w*")
# Public in spite of its underscore: the methods of a named tuple. And a suffix.
PUBLIC = {"_asdict", "_replace", "_v2"}
# Namespaces without an underscore that their libraries call internal.
INTERNAL = re.compile(r"(keras\.src|tensorflow\.python|jax\.interpreters)\b.*")
OF_PRIVATE_NAMES = "private.py", "keras_private.py"


def definitions(tree: ast.AST) -> Iterator[str]:
    """The names that a file defines: functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute):
            if isinstance(node.ctx, ast.Store):
                yield node.id if isinstance(node, ast.Name) else node.attr


def uses(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The private names that a file uses, and where: attributes, imports, strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            source = [node.module] if isinstance(node, ast.ImportFrom) else []
            for alias in node.names:
                path = ".".join([*filter(None, source), alias.name])
                if INTERNAL.fullmatch(path):
                    yield path, node.lineno
                yield from ((part, node.lineno) for part in path.split("."))
            continue
        else:
            continue
        for name in names:
            yield name, node.lineno


def private_uses(text: str) -> list[tuple[str, int]]:
    tree = ast.parse(text)
    own = {*definitions(tree), *PUBLIC}
    return [
        (name, line)
        for name, line in uses(tree)
        if (PRIVATE.fullmatch(name) and name not in own and "keras_mp" not in name)
        or name == "__internal__"
        or INTERNAL.fullmatch(name)
    ]


@once
@pytest.mark.parametrize(
    "path",
    [path for path in FILES if path.name not in OF_PRIVATE_NAMES],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_no_other_file_uses_a_private_name_of_another_library(path):
    found = private_uses(path.read_text())
    assert not found, (
        f"{path.name} uses {found}: take a public way, or put the name into "
        "keras_private.py, or its backend's private.py, with the reason."
    )


@once
@pytest.mark.parametrize(
    "program",
    [
        "import keras.src.backend",
        "from keras.src import backend",
        "from tensorflow.python.ops import nn",
        "import jax._src.core",
        "layer._losses",
        "getattr(layer, '_losses')",
        "tf.__internal__.distribute",
        "self._model",
    ],
)
def test_the_search_finds_it(program):
    assert private_uses(program)


@once
def test_the_search_leaves_alone_what_the_file_defines():
    assert not private_uses("self._scale = 1\nother._scale\n_LIMIT = 2\nprint(_LIMIT)")
