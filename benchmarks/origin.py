"""Where a number was measured: device, versions, commit, day."""

import datetime
import importlib.metadata
import pathlib
import platform
import subprocess
from collections.abc import Iterable
from typing import Any

import keras

import keras_mp
from keras_mp.backends import engine


def origin(packages: Iterable[str] = ()) -> dict[str, Any]:
    """What every record says of where it comes from.

    Args:
        packages: distributions whose versions matter, beside Keras and its backend.
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
    """The first accelerator's name, or else the processor's."""
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
    """Of the checkout that keras_mp lies in, "+" for changes; None without one."""
    folder = pathlib.Path(keras_mp.__file__).parents[1]
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
                # What a run writes itself is no change of what it measures.
                ["status", "--porcelain", "--", "*.py"],
            )
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return found[0] + ("+" if found[1] else "")
