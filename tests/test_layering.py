"""Which module may import which: the arrows go one way.

A folder is a subject. The ground comes first, the command line last.
"""

import ast
import graphlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import keras
import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "keras_mp"
COMMAND_LINE = REPOSITORY / "keras_mp_cli"

# A module imports from its own room and from those above it in this list. A room is a
# module, or a folder with all that is in it. The last is a package beside keras_mp.
ROOMS = [
    [
        "errors",
        "messages",
        "tables",
        "interrupts",
        "keras_private",
        "replaced",
        "types",
        "wanted",
    ],
    ["backends"],
    ["repairs"],
    ["policies"],
    ["config"],
    ["rounding"],
    ["loss_scaling"],
    ["sharding", "still_kernels", "traced"],
    ["first_step"],
    ["calling", "compiling"],
    ["fitting", "unseen"],
    ["conversion", "seams"],
    ["kernels"],
    ["installing"],
    ["tools"],
    ["callbacks"],
    ["__init__"],
    ["keras_mp_cli"],
]

FRAMEWORKS = {"jax", "tensorflow", "torch"}
# The wings, and who imports them: a training does without both.
WINGS = {
    "kernels": {"installing", "tools"},
    "tools": {"__init__", "callbacks", "keras_mp_cli"},
}
# What is imported within some folders alone.
ONLY_IN = {
    ("backends", "repairs", "kernels"): FRAMEWORKS,
    ("tools.display.plots",): {"matplotlib"},
}


class Import(NamedTuple):
    """One import, and the line it stands in."""

    module: str
    line: int
    only_for_types: bool


def modules() -> dict[str, pathlib.Path]:
    """Every module: `backends.jax.engine` of keras_mp, and `keras_mp_cli.run`."""
    found = {}
    for path in sorted([*PACKAGE.rglob("*.py"), *COMMAND_LINE.rglob("*.py")]):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        found[name_of(".".join(parts))] = path
    return found


def name_of(module: str) -> str:
    """A module's name within keras_mp, `__init__` for itself; of others all of it."""
    return "__init__" if module == "keras_mp" else module.removeprefix("keras_mp.")


def imports_of(path: pathlib.Path) -> Iterator[Import]:
    """Every import in a file, those inside functions as well."""
    tree = ast.parse(path.read_text(), str(path))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    package = path.relative_to(REPOSITORY).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            imported = [f"{source}.{alias.name}" for alias in node.names]
        else:
            continue
        for module in imported:
            yield Import(module, node.lineno, id(node) in for_types)


def own_imports(path: pathlib.Path) -> Iterator[tuple[str, int]]:
    """The modules of both packages that a file imports, by their names here."""
    for module, line, _ in imports_of(path):
        if module.split(".")[0] in (PACKAGE.name, COMMAND_LINE.name):
            # `from keras_mp.policies.rule import Rule` is an import of `rule`.
            while name_of(module) not in modules():
                module = module.rpartition(".")[0]
            yield name_of(module), line


def room_of(name: str) -> int | None:
    room = name.split(".")[0]
    floors = [floor for floor, rooms in enumerate(ROOMS) if room in rooms]
    return floors[0] if floors else None


source = pytest.mark.once("It reads the source.")


@pytest.fixture(params=modules().items(), ids=lambda module: module[0])
def module(request):
    return request.param


@source
def test_every_module_has_its_room(module):
    name, path = module
    assert room_of(name) is not None, (
        f"{path.relative_to(REPOSITORY)} is in no room: say in ROOMS, in "
        f"{pathlib.Path(__file__).name}, where {name!r} belongs."
    )


@source
def test_every_room_exists():
    for room in itertools.chain(*ROOMS):
        assert room in modules(), f"ROOMS names {room!r}, which keras_mp has not got."


@source
def test_no_module_imports_from_a_higher_floor(module):
    name, path = module
    for imported, line in own_imports(path):
        own, other = room_of(name), room_of(imported)
        if own is None or other is None:
            continue  # test_every_module_has_its_room fails.
        assert other <= own, (
            f"{path.relative_to(REPOSITORY)}:{line} imports {imported!r}, which is on "
            f"floor {other}, above {name!r} on floor {own}: arrows go one way."
        )


@source
def test_the_core_imports_neither_kernels_nor_tools(module):
    name, path = module
    for imported, line in own_imports(path):
        own, wing = name.split(".")[0], imported.split(".")[0]
        assert own in {wing, *WINGS.get(wing, {own})}, (
            f"{path.relative_to(REPOSITORY)}:{line} imports {imported!r}, of a wing "
            "that the core does without."
        )


@source
def test_no_modules_import_each_other_in_a_circle():
    arrows = {
        name: {imported for imported, _ in own_imports(path)} - {name}
        for name, path in modules().items()
    }
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        circle = " imports ".join(reversed(error.args[1]))
        pytest.fail(f"Modules go round in a circle: {circle}.")


@source
@pytest.mark.parametrize("folders", ONLY_IN)
def test_frameworks_and_matplotlib_are_imported_in_few_folders(module, folders):
    name, path = module
    if name.startswith(folders):
        return
    for imported, line, only_for_types in imports_of(path):
        package = imported.split(".")[0]
        if package in FRAMEWORKS or not only_for_types:
            assert package not in ONLY_IN[folders], (
                f"{path.relative_to(REPOSITORY)}:{line} imports {imported}: only "
                f"{', '.join(folders)} import {package}. Of a framework use keras.ops."
            )


def in_a_fresh_interpreter(program: str) -> list[str]:
    """Runs a program under this backend and reads the JSON on its last line."""
    path = os.pathsep.join(
        [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "KERAS_BACKEND": keras.backend.backend(),
            "PYTHONPATH": path,
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_keras_mp_can_be_imported_where_only_its_backend_is_installed():
    """With the other frameworks, matplotlib and what else is optional out of reach,
    as after `pip install "keras_mp[jax]"`."""
    optional = {"jax", "tensorflow", "torch", "matplotlib", "sklearn"}
    imported = in_a_fresh_interpreter(
        "import json, sys\n"
        f"for name in {sorted(optional - {keras.backend.backend()})}:\n"
        "    sys.modules[name] = None  # importing it raises ImportError\n"
        "import keras_mp\n"
        "print(json.dumps(keras_mp.__all__))\n"
    )
    assert imported


@source
@pytest.mark.parametrize("pattern", ["loss_scaling/*", "backends/**/*", "*"])
def test_what_a_step_runs_has_no_walrus(pattern):
    """TensorFlow's AutoGraph, which reads it in a `tf.function`, warns of one."""
    for path in PACKAGE.glob(f"{pattern}.py"):
        if "jax" in path.parts:
            continue
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.NamedExpr):
                pytest.fail(f"{path.name}:{function.lineno} has a walrus (:=).")
