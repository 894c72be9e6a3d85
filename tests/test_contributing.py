"""What contributors are told to run is there."""

import pathlib
import re

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
TEXTS = ("CONTRIBUTING.md", ".github/workflows/ci.yml", ".pre-commit-config.yaml")
pytestmark = pytest.mark.once("It reads files of the repository.")


def text(name):
    return (REPOSITORY / name).read_text()


@pytest.mark.parametrize("name", [*TEXTS, "README.md", ".ci/run"])
def test_every_target_that_is_named_exists(name):
    backends = re.search(r"^BACKENDS \?= (.*)$", text("Makefile"), re.M)[1].split()
    rules = re.findall(r"^([a-z][a-z-]*):", text("Makefile"), re.M)
    known = {*rules, *(f"test-{backend}" for backend in backends)}
    lines = text(name).replace("${{ matrix.backend }}", "jax")
    # In running text it stands in quotes, elsewhere on a line of its own.
    named = re.findall(r"(?:`|run: |entry: |^)make ([a-z-]+)", lines, re.M)
    assert named and set(named) <= known


def test_every_quick_test_that_is_left_out_exists():
    slow = re.search(r"^SLOW := ((?:.*\\\n)*.*)$", text("Makefile"), re.M)[1]
    names = slow.replace("\\", " ").split()
    assert len(names) > 5
    for name in names:
        assert (REPOSITORY / f"tests/test_{name}.py").exists(), name


def test_the_workflow_tests_every_backend():
    (matrix,) = re.findall(r"backend: \[(.*)\]", text(".github/workflows/ci.yml"))
    (backends,) = re.findall(r"^BACKENDS \?= (.*)$", text("Makefile"), re.M)
    assert matrix.split(", ") == backends.split()


def test_one_test_that_contributing_names_exists():
    command = re.search(r"pytest (tests/\S+) -k (\w+)", text("CONTRIBUTING.md"))
    assert command[2] in (REPOSITORY / command[1]).read_text()
