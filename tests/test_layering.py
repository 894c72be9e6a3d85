"""Which module of keras_mp may import which: the arrows go one way.

The layers are those of the design: the ground first, then policies and the
optimizer, conversion, integration, what a user calls, and the public names on top.
"""

import ast
import graphlib
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

# A module imports from its own layer and from those above it in this list. A
# package stands for all that is in it. A new module goes where its imports and its
# importers leave it a place; if they leave it none, it is two modules.
LAYERS = [
    # the ground: the frameworks, the pure rules, what can go wrong
    [
        "backend",
        "errors",
        "global_norm",
        "gradient_check",
        "loss_scale",
        "nonfinite",
        "parts",
        "rule",
        "rules",
        "tables",
    ],
    # policies and the optimizer: the rules with a state
    [
        "checkpoint",
        "explicit_scaling",
        "gradient_stage",
        "hardware",
        "incoming_gradients",
        "inner_optimizer",
        "loss_scale_optimizer",
        "optimizer_log",
        "policies",
        "scaling_state",
        "skip_watch",
        "underflow",
    ],
    # models that exist already
    ["conversion", "model_files", "model_inputs", "outputs", "scaling", "symbolic"],
    # the seams: where it meets Keras
    ["integration"],
    # what a user calls
    ["callbacks", "config", "demo", "diagnostics"],
    # the table of contents
    ["__init__"],
    # what measures it, through the public names as a user does
    ["benchmarks"],
]

FRAMEWORKS = {"jax", "tensorflow", "torch"}


class Import(NamedTuple):
    """One import, and the line it stands in."""

    module: str
    line: int
    only_for_types: bool


def modules() -> dict[str, pathlib.Path]:
    """Every module of the package by its name within it: `backend.jax`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[-1] == "__init__" and len(parts) > 1:
            parts = parts[:-1]
        found[".".join(parts)] = path
    return found


def imports_of(name: str, path: pathlib.Path) -> Iterator[Import]:
    """Every import in a file, those inside functions as well."""
    tree = ast.parse(path.read_text(), str(path))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    package = ["keras_mp", *name.split(".")]
    if path.name != "__init__.py" or name == "__init__":
        package = package[:-1]
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


def own_imports(name: str, path: pathlib.Path) -> Iterator[tuple[str, int]]:
    """The modules of keras_mp that a file imports, by their names within it."""
    for module, line, _ in imports_of(name, path):
        if module.split(".")[0] == "keras_mp":
            # `from keras_mp.rules import Rule` is an import of `rules`.
            within = module.split(".")[1:]
            while within and ".".join(within) not in modules():
                within = within[:-1]
            yield ".".join(within) or "__init__", line


def layer_of(name: str) -> int | None:
    for number, layer in enumerate(LAYERS):
        if name.split(".")[0] in layer:
            return number
    return None


@pytest.fixture(params=modules().items(), ids=lambda module: module[0])
def module(request):
    return request.param


def test_every_module_has_its_layer(module):
    name, path = module
    assert layer_of(name) is not None, (
        f"{path.relative_to(REPOSITORY)} is in no layer: say in LAYERS, in "
        f"{pathlib.Path(__file__).name}, where {name!r} belongs."
    )


def test_every_module_of_the_table_exists():
    there = {name.split(".")[0] for name in modules()}
    for layer in LAYERS:
        for name in layer:
            assert name in there, f"LAYERS names {name!r}, which keras_mp has not got."


def test_no_module_imports_from_a_higher_layer(module):
    name, path = module
    for imported, line in own_imports(name, path):
        own, other = layer_of(name), layer_of(imported)
        if own is None or other is None:
            continue  # told by test_every_module_has_its_layer
        assert other <= own, (
            f"{path.relative_to(REPOSITORY)}:{line} imports {imported!r}, which is in "
            f"layer {other}, above {name!r} in layer {own}: arrows go one way."
        )


def test_no_modules_import_each_other_in_a_circle():
    arrows = {
        name: {imported for imported, _ in own_imports(name, path)} - {name}
        for name, path in modules().items()
    }
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        circle = " imports ".join(reversed(error.args[1]))
        pytest.fail(f"Modules of keras_mp go round in a circle: {circle}.")


def test_frameworks_are_imported_in_backend_only(module):
    name, path = module
    # The benchmarks time the frameworks' own ways of doing it.
    if name.split(".")[0] in ("backend", "benchmarks"):
        return
    for imported, line, _ in imports_of(name, path):
        assert imported.split(".")[0] not in FRAMEWORKS, (
            f"{path.relative_to(REPOSITORY)}:{line} imports {imported}: frameworks "
            "are imported in backend and benchmarks only. Use keras.ops."
        )


def test_matplotlib_is_imported_in_plots_only(module):
    name, path = module
    if name.startswith("diagnostics.plots"):
        return
    for imported, line, only_for_types in imports_of(name, path):
        assert imported.split(".")[0] != "matplotlib" or only_for_types, (
            f"{path.relative_to(REPOSITORY)}:{line} imports {imported}: pictures are "
            "drawn in keras_mp/diagnostics/plots only."
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


def test_importing_keras_mp_loads_no_framework_and_no_matplotlib_of_its_own():
    """Compared with Keras, which loads matplotlib itself where it is installed, and
    under some backends JAX."""
    loaded = in_a_fresh_interpreter(
        "import json, sys\n"
        "import keras\n"
        "before = set(sys.modules)\n"
        "import keras_mp\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))\n"
    )
    unwanted = (FRAMEWORKS - {keras.backend.backend()}) | {"matplotlib"}
    assert [name for name in loaded if name.split(".")[0] in unwanted] == []
    assert "keras_mp.diagnostics.plots" not in loaded, (
        "`import keras_mp` loads keras_mp.diagnostics.plots, and with it matplotlib: "
        "import it where a picture is drawn."
    )


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
