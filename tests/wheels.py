"""The wheel of this checkout."""

import pathlib
import shutil
import subprocess
import sys

import pytest
from workplace import ROOT

PACKAGES = ("keras_mp", "keras_mp_cli")


def built_wheel(folder: pathlib.Path) -> pathlib.Path:
    """Builds the wheel in a folder, from copies of what belongs to it and does not."""
    pytest.importorskip("setuptools", minversion="77")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder)
    for name in (*PACKAGES, "benchmarks", "sweeps", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "*.png", "*.keras")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    program = "from setuptools import build_meta; build_meta.build_wheel('.')"
    subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel
