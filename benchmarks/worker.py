"""The other end of `processes.py`: measures, and says on stdout what has come of it."""

import importlib
import json
import math
import sys
import time
import warnings
from typing import Any

TOLD_EVERY = 0.2  # seconds


def main(job: dict[str, Any]) -> None:
    """Measures what a job says.

    Args:
        job: the suite, what tells the records from others, and more arguments of the
            suite's `measure`.
    """
    out, sys.stdout = sys.stdout, sys.stderr  # The rest may print what it likes.
    warnings.simplefilter("ignore")
    suite = importlib.import_module(f"benchmarks.{job['suite']}")
    last = 0.0

    def say(kind: str, what: Any) -> None:
        print(kind, json.dumps(what), file=out, flush=True)

    def tell(part: float) -> None:
        nonlocal last
        if time.monotonic() > last + TOLD_EVERY:
            last = time.monotonic()
            say("part", part)

    def ready() -> None:
        say("ready", None)
        if not sys.stdin.readline():
            raise SystemExit("nobody is there any more to ask for records")

    for record in suite.measure(
        **job["about"], **job["options"], tell=tell, ready=ready
    ):
        say("record", rounded(record))


def rounded(value: Any) -> Any:
    """Numbers with six digits, more than was measured; None for nan and infinity."""
    if isinstance(value, dict):
        return {name: rounded(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(x) for x in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
