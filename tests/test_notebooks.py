"""The notebooks run from top to bottom, and are committed with their outputs."""

import os
import re

import matplotlib
import matplotlib.font_manager
import nbformat
import pytest
import traitlets
from backends import BACKEND
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from workplace import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# A cell tagged so prints the same on every backend and machine.
SAME = "same-on-every-backend"

notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)

# Half a minute each, so one backend each; `make test-notebooks` runs all on all. Number
# 3 has code of its own for each backend.
BACKENDS = ("jax", "tensorflow", "jax", "torch", "jax")
HERE = [
    path
    for path, backend in zip(NOTEBOOKS, BACKENDS, strict=True)
    if backend == BACKEND
    or path.stem == "03_custom_training"
    or os.environ.get("EVERY_NOTEBOOK")
]


@pytest.mark.parametrize("path", HERE, ids=lambda path: path.stem)
@pytest.mark.slow("Each trains models, in a process of its own.")
def test_notebook_runs_afresh_without_a_word_on_stderr(path, tmp_path):
    committed = nbformat.read(path, as_version=4)
    fresh = execute(without_outputs(committed), tmp_path)
    assert_outputs_are_in_order(fresh)
    for before, after in zip(code_cells(committed), code_cells(fresh), strict=True):
        if SAME in before.metadata.get("tags", ()):
            assert printed(after) == printed(before)


@notebooks
def test_committed_notebook_shows_its_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert_outputs_are_in_order(notebook)
    assert [c.execution_count for c in code_cells(notebook)] == list(
        range(1, len(code_cells(notebook)) + 1)
    )
    same = [c for c in code_cells(notebook) if SAME in c.metadata.get("tags", ())]
    assert same and all(printed(cell) for cell in same)


@notebooks
def test_committed_notebook_is_small_and_holds_nothing_of_the_machine(path):
    text = path.read_text()
    assert len(text) < 300_000
    for of_a_machine in ("/home/", "/root/", "/tmp/", "/work/", "site-packages"):
        assert of_a_machine not in text


@notebooks
def test_notebook_begins_with_what_one_learns_and_then_prepares_itself(path):
    title, setup, *others = nbformat.read(path, as_version=4).cells
    assert title.cell_type == "markdown"
    # A full stop within a word, as in a name, ends no sentence.
    assert re.fullmatch(r"# .+\n\n([^#.?!]|\.(?=\w))+\.", title.source)
    assert setup.cell_type == "code"
    assert 'os.environ.setdefault("KERAS_BACKEND", "jax")' in setup.source
    assert not re.search(r"^\s*(import|from) keras", setup.source, re.MULTILINE)
    [install] = re.findall(
        r"^ +%pip install -q \./keras_mp-\*\.whl .*", setup.source, re.MULTILINE
    )
    with_data = any("sklearn" in cell.source for cell in others)
    assert ("scikit-learn" in install) == with_data


class ManagerOfThisInterpreter(AsyncKernelManager):
    """Starts a kernel of the interpreter that the tests run in, and of no other."""

    @traitlets.default("kernel_spec_manager")
    def _without_folders_to_look_for_others_in(self):
        return KernelSpecManager(kernel_dirs=[])


def execute(notebook, folder):
    """Runs a notebook in `folder` with this interpreter, under the present backend."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "KERAS_BACKEND": BACKEND,
        "PYTHONPATH": path.rstrip(os.pathsep),
        "IPYTHONDIR": str(folder / "ipython"),  # nobody's start-up files
        # A set MPLBACKEND would keep the pictures out of the notebook.
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        # This process has the fonts listed by now: the kernel need not list them
        # again, which it would say on stderr.
        "MPLCONFIGDIR": matplotlib.get_cachedir(),
    }
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        kernel_manager_class=ManagerOfThisInterpreter,
        timeout=300,  # seconds a cell
        resources={"metadata": {"path": str(folder)}},
    )
    return client.execute(env=environment)


def without_outputs(notebook):
    notebook = nbformat.from_dict(notebook)
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    return notebook


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell):
    # In pieces or in one: how a kernel sends its text depends on the time it takes.
    return "".join(o.text for o in cell.outputs if o.output_type == "stream")


def pictures(cell):
    return [o for o in cell.outputs if "image/png" in o.get("data", ())]


def assert_outputs_are_in_order(notebook):
    cells = code_cells(notebook)
    for cell in cells:
        assert all(output.output_type != "error" for output in cell.outputs)
        assert [o.text for o in cell.outputs if o.get("name") == "stderr"] == []
        assert printed(cell) or "print(" not in cell.source
        assert pictures(cell) or "plt.show(" not in cell.source
    assert sum(len(pictures(cell)) for cell in cells) >= 2
