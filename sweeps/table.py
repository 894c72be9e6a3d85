"""A table of cases, run on every backend: the command line of a sweep."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

BACKENDS = ("jax", "tensorflow", "torch")
BACKEND = keras.backend.backend()


def main(name: str, cases: Iterable[Any], disagreement: Callable[[Any], float]) -> None:
    """Runs the cases of `python -m sweeps.NAME`, and exits with 1 if any fails.

    Args:
        name: the module in `sweeps`.
        cases: each prints as what it is.
        disagreement: case -> how far it is from float32; rounding explains up to 1.
    """
    parser = argparse.ArgumentParser(prog=f"python -m sweeps.{name}")
    parser.add_argument("--backend", choices=BACKENDS, help="all three unless given")
    arguments = parser.parse_args()
    if arguments.backend == BACKEND:
        sys.exit(_sweep(cases, disagreement) > 0)
    failed = False
    for backend in [arguments.backend] if arguments.backend else BACKENDS:
        # Keras reads KERAS_BACKEND once, when it is imported: a process for each.
        command = [sys.executable, "-m", f"sweeps.{name}", "--backend", backend]
        environment = {**os.environ, "KERAS_BACKEND": backend}
        failed |= subprocess.run(command, env=environment).returncode != 0
    sys.exit(failed)


def _sweep(cases: Iterable[Any], disagreement: Callable[[Any], float]) -> int:
    """Runs the table on this backend, prints what fails and returns how many do."""
    found = []
    for case in cases:
        try:
            apart, message = disagreement(case), ""
        except Exception as error:  # The table shows it, of whatever kind.
            apart, message = np.inf, f"{type(error).__name__}: {error}"[:300]
        found.append(apart)
        if apart > 1:
            message = message or f"{apart:.2f} times what rounding explains"
            print(f"{BACKEND}: {case}: {message}", flush=True)
    failed = sum(apart > 1 for apart in found)
    print(f"{BACKEND}: {failed} of {len(found)} fail; at worst {max(found):.2f}")
    return failed
