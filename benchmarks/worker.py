"""The other end of `processes.py`: measures, and writes its records to stdout."""

import json
import math
import sys
import time
import warnings
from typing import Any

INTERVAL = 0.2  # seconds between two messages about the progress


def main(job: dict[str, Any]) -> None:
    """Measures a job.

    Args:
        job: the "suite", and in "about" and "options" the arguments of its `measure`.
    """
    out, sys.stdout = sys.stdout, sys.stderr  # Others may print, too.
    warnings.simplefilter("ignore")
    # Imported here: it imports a framework, which may print as well.
    from benchmarks.suites import suite_named

    measure = suite_named(job["suite"]).measure
    last = 0.0

    def send(kind: str, value: Any) -> None:
        print(kind, json.dumps(value), file=out, flush=True)

    def progress(part: float) -> None:
        nonlocal last
        if time.monotonic() > last + INTERVAL:
            last = time.monotonic()
            send("part", part)

    def ready() -> None:
        send("ready", None)
        if not sys.stdin.readline():
            raise SystemExit("the process that asked for records has ended")

    arguments = {**job["about"], **job["options"]}
    for record in measure(**arguments, progress=progress, ready=ready):
        send("record", rounded(record))


def rounded(value: Any) -> Any:
    """Numbers with six digits, which is enough; None for nan and infinity."""
    if isinstance(value, dict):
        return {name: rounded(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(x) for x in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
