"""What contributors are told to run is there."""

import pathlib
import re
import tomllib

import pytest

import keras_mp

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
WORKFLOWS = [f".github/workflows/{name}.yml" for name in ("ci", "nightly")]
TEXTS = ["CONTRIBUTING.md", *WORKFLOWS, ".pre-commit-config.yaml"]
pytestmark = pytest.mark.once("It reads files of the repository.")


def text(name):
    return (REPOSITORY / name).read_text()


@pytest.mark.parametrize("name", [*TEXTS, "README.md", ".ci/run"])
def test_every_target_that_is_named_exists(name):
    backends = re.search(r"^BACKENDS \?= (.*)$", text("Makefile"), re.M)[1].split()
    rules = re.findall(r"^([a-z][a-z-]*):", text("Makefile"), re.M)
    known = {*rules, *(f"test{of}-{name}" for name in backends for of in ("", "-slow"))}
    lines = re.sub(r"\$\{\{ matrix.backend \}\}", "jax", text(name))
    lines = re.sub(r"\$\{\{ matrix.gates \}\}", "gpu-gates", lines)
    # In running text it stands in quotes, elsewhere on a line of its own.
    named = re.findall(r"(?:`|run: |entry: |^)make ([a-z-]+)", lines, re.M)
    assert named and set(named) <= known


def test_the_quick_tests_call_every_public_name():
    fast = re.search(r"^FAST := ((?:.*\\\n)*.*)$", text("Makefile"), re.M)[1]
    names = fast.replace("\\", " ").split()
    tests = "".join(text(f"tests/test_{name}.py") for name in names)
    verbs = {*keras_mp.__all__, *keras_mp.callbacks.__all__} - {"callbacks"}
    assert {name for name in verbs if not re.search(rf"\b{name}[(,)]", tests)} == set()


def test_the_workflows_test_every_backend_and_sets_that_exist():
    (backends,) = re.findall(r"^BACKENDS \?= (.*)$", text("Makefile"), re.M)
    for name in WORKFLOWS:
        matrices = re.findall(r"backend: \[(.*)\]", text(name))
        assert {tuple(x.split(", ")) for x in matrices} == {tuple(backends.split())}
    (matrix,) = re.findall(r" set: \[(.*)\]", text(WORKFLOWS[1]))
    assert {*matrix.split(", ")} < {*tomllib.loads(text("tests/versions/sets.toml"))}


def test_one_test_that_contributing_names_exists():
    command = re.search(r"pytest (tests/\S+) -k (\w+)", text("CONTRIBUTING.md"))
    assert command[2] in (REPOSITORY / command[1]).read_text()
