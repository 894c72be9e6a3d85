"""The sweep over whole models: `python -m sweeps.models`, or `make sweep-models`.

Every model of `model_cases.py`, made mixed in each way, goes through the checks of
`model_checks.py`. Each row goes to a scratch file at once, so that a sweep that was cut
off goes on where it stopped.
"""

import argparse
import faulthandler
import json
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from sweeps import models_report

BACKENDS = ("jax", "tensorflow")
POLICIES = ("mixed_float16", "mixed_bfloat16")
HOW = ("global", "dtype", "convert", "keras", "keras dtype")
REPOSITORY = pathlib.Path(__file__).parent.parent
SCRATCH = REPOSITORY / "build" / "sweep-models.jsonl"

# The exit status of a process that has grown too large, with work left.
AGAIN = 75
LARGE = 4 * 2**20  # in KiB, as getrusage counts
LONGEST = 900  # seconds for one row


def main() -> None:
    arguments = _arguments()
    SCRATCH.parent.mkdir(exist_ok=True)
    if arguments.fresh:
        SCRATCH.unlink(missing_ok=True)
    if arguments.within:
        _sweep(arguments)
        return
    if arguments.again:
        kept = [row for row in finished().values() if row["outcome"] == "ok"]
        SCRATCH.write_text("".join(json.dumps(row) + "\n" for row in kept))
    for backend in arguments.backend.split(","):
        _in_processes(backend)
    if not arguments.only:
        models_report.write(list(finished().values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default=",".join(BACKENDS))
    parser.add_argument("--policy", default=",".join(POLICIES))
    parser.add_argument("--how", default=",".join(HOW))
    parser.add_argument("--only", default="", help="regular expression of names")
    parser.add_argument("--fresh", action="store_true", help="forget all rows")
    parser.add_argument("--again", action="store_true", help="forget failed rows")
    parser.add_argument("--within", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def finished() -> dict[tuple, dict[str, Any]]:
    """The rows so far, each under its model, backend, policy and way."""
    rows: dict[tuple, dict[str, Any]] = {}
    if SCRATCH.exists():
        for line in SCRATCH.read_text().splitlines():
            row = json.loads(line)
            rows[key(row)] = row
    return rows


def key(row: dict[str, Any]) -> tuple:
    return row["model"], row["backend"], row["policy"], row["how"]


def _in_processes(backend: str) -> None:
    """Sweeps over one backend, in a new process when one has crashed or grown large."""
    flags = (
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "KERAS_BACKEND": backend,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            # Compiling takes most of the time: optimize less, and compile only once.
            "XLA_FLAGS": flags,
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        command = [sys.executable, "-m", "sweeps.models", "--within"]
        passed_on = [a for a in sys.argv[1:] if a not in ("--fresh", "--again")]
        code: int | None = AGAIN
        while code != 0:
            code = subprocess.run(
                [*command, *passed_on, "--backend", backend],
                cwd=REPOSITORY,
                env=environment,
            ).returncode
            if code not in (0, AGAIN):
                _note_crash(code)


def _note_crash(code: int) -> None:
    last = list(finished().values())[-1:]
    if not last or last[0]["outcome"] is not None:
        raise SystemExit(f"The sweep ended with code {code} outside of any model.")
    _add({**last[0], "outcome": f"the process ended with code {code}"})


def _add(row: dict[str, Any]) -> None:
    with SCRATCH.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _sweep(arguments: argparse.Namespace) -> None:
    import warnings

    warnings.simplefilter("ignore")
    from sweeps.model_cases import cases
    from sweeps.model_checks import Run

    done = finished()
    for case in cases():
        if not re.search(arguments.only, case.name):
            continue
        for row in _rows(case.name, arguments):
            if key(row) in done or not _wanted(row, done):
                continue
            if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > LARGE:
                sys.exit(AGAIN)
            _add({**row, "outcome": None})
            faulthandler.dump_traceback_later(LONGEST, exit=True)
            start = time.monotonic()
            run = Run(case, row["policy"], row["how"], _skipped(row, done))
            result = run.result()
            faulthandler.cancel_dump_traceback_later()
            seconds = round(time.monotonic() - start, 1)
            row |= {**result._asdict(), "seconds": seconds}
            done[key(row)] = row
            _add(row)
            print(*key(row), f"{seconds} s", row["outcome"][:300], flush=True)


def _rows(model: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for policy in arguments.policy.split(","):
        for how in arguments.how.split(","):
            yield {
                "model": model,
                "backend": arguments.backend,
                "policy": policy,
                "how": how,
            }


def _skipped(row: dict[str, Any], done: dict[tuple, dict[str, Any]]) -> int:
    """How many steps the same model skipped under the global policy, if it trained.

    The other ways start at the scale that it ended with, because skipping takes time.
    """
    other = done.get(key({**row, "how": "global"}), row)
    ours = row["how"] in ("dtype", "convert")
    return other["skipped"] if ours and other.get("outcome") == "ok" else 0


def _wanted(row: dict[str, Any], done: dict[tuple, dict[str, Any]]) -> bool:
    """Plain Keras runs only where we have failed."""
    asked = models_report.PLAIN.values()
    ways = [way for way, plain in models_report.PLAIN.items() if plain == row["how"]]
    ours = [done.get(key({**row, "how": way})) for way in ways]
    return row["how"] not in asked or any(r and r["outcome"] != "ok" for r in ours)


if __name__ == "__main__":
    main()
