"""What pip installs: every import is declared, and the wheel holds two packages."""

import re
import sys
import tomllib
import zipfile

import pytest
from test_layering import imports_of, modules
from wheels import PACKAGES, built_wheel
from workplace import ROOT

pytestmark = pytest.mark.once

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
