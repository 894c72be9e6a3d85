"""Where and when a number was measured: device, versions, commit, day."""

import datetime
import importlib.metadata
import pathlib
import platform
import subprocess
from collections.abc import Iterable
from typing import Any

import keras

from keras_mp.backends import engine


def origin(packages: Iterable[str] = ()) -> dict[str, Any]:
    """The entries of every record about where and when it was measured.

    Args:
        packages: distributions whose versions matter beside Keras and its backend.
    """
    names = ["keras", keras.backend.backend(), *packages]
    versions = {"python": platform.python_version()}
    for name in dict.fromkeys(names):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": device(),
        "versions": versions,
        "commit": commit(),
        "day": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def device() -> str:
    """The name of the first accelerator, or of the processor."""
    accelerators = [d.name for d in engine.list_devices() if d.kind != "cpu"]
    return accelerators[0] if accelerators else _processor()


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of this checkout, with "+" for changes; None without git."""
    folder = pathlib.Path(__file__).parents[1]
    if not (folder / ".git").exists():
        return None
    try:
        found = [
            subprocess.run(
                ["git", "-C", str(folder), *arguments],
                capture_output=True,
                text=True,
                check=True,
            ).stdout.strip()
            for arguments in (
                ["rev-parse", "--short=12", "HEAD"],
                # The results that a run writes do not change what it measures.
                ["status", "--porcelain", "--", "*.py"],
            )
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return found[0] + ("+" if found[1] else "")
