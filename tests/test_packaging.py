"""What pip installs: every import is declared, and the wheel holds two packages."""

import email
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest
from test_layering import imports_of, modules
from wheels import PACKAGES, built_wheel
from workplace import ROOT

import keras_mp

pytestmark = pytest.mark.once("It reads files of the repository.")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The names of packages whose modules are called otherwise.
PACKAGE_OF = {"sklearn": "scikit-learn"}


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}


@pytest.fixture(scope="module")
def imported():
    found = {
        each.module.partition(".")[0]
        for path in modules().values()
        for each in imports_of(path)
    }
    third_party = found - sys.stdlib_module_names - set(PACKAGES)
    return {PACKAGE_OF.get(name, name) for name in third_party}


def test_every_import_is_a_dependency_or_an_extra(imported):
    extras = PROJECT["optional-dependencies"]
    required = names(PROJECT["dependencies"])
    optional = set().union(
        *(names(extras[e]) for e in ("jax", "tensorflow", "torch", "plots", "demo"))
    )
    assert imported <= required | optional
    assert not required & optional


def test_every_dependency_is_imported(imported):
    assert names(PROJECT["dependencies"]) <= imported


def test_the_wheel_holds_two_packages_with_their_types(tmp_path):
    wheel = built_wheel(tmp_path)
    held = set(zipfile.ZipFile(wheel).namelist())
    files = {
        str(path.relative_to(ROOT))
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.suffix in (".py", ".typed")
    }
    assert {name for name in held if ".dist-info/" not in name} == files
    assert {f"{name}/py.typed" for name in PACKAGES} <= held


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """The source distribution, of copies of what belongs to it and does not."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("sdist")
    ignored = shutil.ignore_patterns(".git", ".venv*", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, folder / "repository", ignore=ignored, symlinks=True)
    program = "from setuptools import build_meta; build_meta.build_sdist('..')"
    run = [sys.executable, "-c", program]
    subprocess.run(run, cwd=folder / "repository", check=True, capture_output=True)
    (file,) = folder.glob("*.tar.gz")
    with tarfile.open(file) as opened:
        yield opened


def test_the_source_distribution_holds_each_notebook_once(archive):
    notebooks = [name for name in archive.getnames() if name.endswith(".ipynb")]
    assert len(notebooks) == len([*(ROOT / "notebooks").glob("*.ipynb")]) == 5
    assert not any("docs" in name for name in notebooks)


def test_the_description_reads_without_the_repository(archive):
    (name,) = [
        name
        for name in archive.getnames()
        if name.count("/") == 1 and name.endswith("/PKG-INFO")
    ]
    facts = email.message_from_bytes(archive.extractfile(name).read())
    text = facts.get_payload()
    assert facts["Description-Content-Type"] == "text/markdown"
    targets = re.findall(r"\]\((.*?)\)", text)
    assert len(targets) > 15 and all(t.startswith("https://") for t in targets)
    assert not re.search(r"<!--|<picture|srcset|docs/images", text)
    assert "0.99 to 1.01 with keras_mp" in text  # What the picture shows.
    assert {"Source", "Documentation", "Changelog", "Issues"} == {
        url.partition(",")[0] for url in facts.get_all("Project-URL")
    }
    assert facts["Author"] == "keras_mp contributors"


def test_the_version_is_one():
    changes = (ROOT / "CHANGELOG.md").read_text()
    newest = re.findall(r"^## \[(.*?)\]", changes, re.M)[0]
    assert PROJECT["version"] == keras_mp.__version__ == newest
