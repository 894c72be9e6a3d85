"""Runs the tests on each set of versions in sets.toml: `make test-versions`.

    python tests/versions/run.py [SET ...]

makes an environment for each set, runs the broad tests and the core test files in it,
prints a table and writes it into CONTRIBUTING.md, where the rows of other sets stay.
"""

import datetime
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from os import environ
from typing import NamedTuple
from xml.etree import ElementTree

HERE = pathlib.Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
ENVIRONMENTS = REPOSITORY / ".venv-versions"
CONTRIBUTING = REPOSITORY / "CONTRIBUTING.md"
TABLE = re.compile(
    "(<!-- measured: versions -->)(.*)(<!-- end of versions -->)", re.DOTALL
)
HEADER = (
    "| set | Python | Keras | backend | broad tests | core tests |\n"
    "| --- | --- | --- | --- | --- | --- |"
)

BACKENDS = ("jax", "tensorflow", "torch")
# What the tests import, beside the package and its backends.
TOOLS = ("pytest", "hypothesis", "allpairspy", "matplotlib", "rich", "scikit-learn")
# In place of those in tests/conftest.py: XLA aborts on a flag that it does not know.
XLA_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)


class Set(NamedTuple):
    """One set of versions."""

    name: str
    python: str
    packages: list[str]
    core: list[str]
    keras: str | None = None
    also: Sequence[str] = ()

    @property
    def backends(self) -> list[str]:
        names = [package.split("==")[0] for package in self.packages]
        return [backend for backend in BACKENDS if backend in names]

    @property
    def interpreter(self) -> str:
        return str(ENVIRONMENTS / self.name / "bin" / "python")


class LeftOut(NamedTuple):
    """What fails on some sets because of an old Keras or JAX alone."""

    sets: list[str]
    reason: str
    tests: str = ""
    warning: str = ""


def interpreter(version: str) -> str | None:
    """A Python of this version, if there is one."""
    for candidate in (sys.executable, f"python{version}"):
        show = [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        try:
            found = subprocess.run(show, capture_output=True, text=True)
        except OSError:
            continue
        if found.stdout.strip() == version:
            return candidate
    return None


def install(versions: Set, python: str) -> None:
    """Makes the environment of a set, unless it is there already.

    One with the newest versions of something is made anew each day.
    """
    folder = ENVIRONMENTS / versions.name
    stamp = folder / "made-for"
    pinned = all("==" in package for package in versions.packages)
    day = "" if pinned else f"{datetime.date.today()}"
    wanted = f"{python} {versions.packages} {versions.keras} {TOOLS} {day}"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", folder], check=True)
    pip = [versions.interpreter, "-m", "pip", "--quiet"]
    # With its extras: pip refuses a set that the bounds in pyproject.toml leave out.
    package = f"{REPOSITORY}[{','.join(versions.backends)}]"
    install = [*pip, "install", *versions.packages, *TOOLS, "--editable", package]
    subprocess.run(install, check=True)
    if versions.keras is not None:
        subprocess.run([*pip, "uninstall", "--yes", "keras"], check=True)
        install = [*pip, "install", "--pre", "--no-deps", versions.keras]
        subprocess.run(install, check=True)
    stamp.write_text(wanted)


def version(versions: Set, package: str) -> str:
    show = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    done = subprocess.run(
        [versions.interpreter, "-c", show, package],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def run_tests(
    versions: Set, backend: str, files: Sequence[str], options: Sequence[str]
) -> str:
    """What came of these test files, in words; failures are printed as well."""
    environment = environ | {
        "KERAS_BACKEND": backend,
        "PYTHONPATH": str(REPOSITORY),
        "XLA_FLAGS": XLA_FLAGS,
    }
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        done = subprocess.run(
            [
                *(versions.interpreter, "-m", "pytest", *files, "--quiet", *options),
                *("-p", "no:cacheprovider", f"--junitxml={report}"),
            ],
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
        )
        counted = ElementTree.parse(report).getroot()[0] if report.exists() else None
    if done.returncode:
        print("\n".join((done.stdout + done.stderr).splitlines()[-30:]))
    if counted is None:
        return "**ends early**"
    tests, errors, failures, skipped = (
        int(counted.get(name, 0)) for name in ("tests", "errors", "failures", "skipped")
    )
    text = f"{tests - errors - failures - skipped} passed"
    if done.returncode:
        text = f"**{errors + failures} failed**, {text}"
    return f"{text}, {skipped} skipped" if skipped else text


def rows(
    versions: Set, broad: list[str], core: list[str], left_out: list[LeftOut]
) -> Iterator[str]:
    """Runs the tests of a set: a row of the table for each backend."""
    of_this = [each for each in left_out if versions.name in each.sets]
    options = [f"-Wignore::{each.warning}" for each in of_this if each.warning]
    without = [each.tests for each in of_this if each.tests]
    if without:
        options += ["-k", f"not ({' or '.join(without)})"]
    keras = version(versions, versions.keras or "keras")
    for backend in versions.backends:
        results = [run_tests(versions, backend, broad, options), ""]
        if backend in versions.core:
            results[1] = run_tests(versions, backend, [*core, *versions.also], options)
        cells = [versions.name, versions.python, keras]
        cells += [f"{backend} {version(versions, backend)}", *results]
        row = f"| {' | '.join(cells)} |"
        print(row, flush=True)
        yield row


def write(new: dict[str, list[str]], order: list[str], left_out: list[LeftOut]) -> None:
    """Puts the rows of these sets into CONTRIBUTING's table."""
    text = CONTRIBUTING.read_text()
    found = TABLE.search(text)
    if found is None:
        sys.exit("CONTRIBUTING.md has no <!-- measured: versions --> to write into.")
    all_rows: dict[str, list[str]] = {}
    for row in found[2].strip().partition("\n\n")[0].splitlines()[2:]:
        all_rows.setdefault(row.split("|")[1].strip(), []).append(row)
    all_rows |= new
    lines = [HEADER, *(row for name in order for row in all_rows.get(name, []))]
    reasons = ["Left out:", ""]
    for each in left_out:
        what = each.tests or each.warning
        reasons.append(f"- {', '.join(each.sets)}: `{what}`: {each.reason}.")
    table = "\n\n".join([found[1], "\n".join(lines), "\n".join(reasons), found[3]])
    CONTRIBUTING.write_text(text[: found.start()] + table + text[found.end() :])


def main(asked: list[str]) -> int:
    described = tomllib.loads((HERE / "sets.toml").read_text())
    broad, core = described.pop("broad_tests"), described.pop("core_files")
    left_out = [LeftOut(**values) for values in described.pop("left_out")]
    sets = {name: Set(name, **values) for name, values in described.items()}
    if unknown := sorted({*asked} - {*sets}):
        sys.exit(f"No such set: {', '.join(unknown)}. There are: {', '.join(sets)}.")
    print(HEADER)
    results: dict[str, list[str]] = {}
    for name in asked or sets:
        python = interpreter(sets[name].python)
        if python is None:
            print(f"{name} is left out: there is no Python {sets[name].python} here.")
            continue
        install(sets[name], python)
        results[name] = []
        for row in rows(sets[name], broad, core, left_out):
            results[name].append(row)
            write(results, list(sets), left_out)
    return int(any("**" in row for each in results.values() for row in each))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
