"""`python -m sweeps.layers`: every layer in half precision, under stock Keras and ours.

Each case (`layer_cases`) runs in float32, then under the mixed policies of Keras and of
keras_mp: forward and backward, eagerly and compiled, and two steps of `fit`. What is
wrong goes to layers.json, and from there into README.md; all else is "ok" there.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import warnings
from typing import Any

from sweeps import layer_table
from sweeps.layer_table import OK, RESULTS

BACKENDS = ("jax", "tensorflow", "torch")
DTYPES = ("float16", "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sweeps.layers")
    parser.add_argument("--backend", choices=BACKENDS, help="all three unless given")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--modes", nargs="+", help="eager, jit, graph, xla, fit")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.backend and os.environ.get("KERAS_BACKEND") == arguments.backend:
        sweep(arguments)
        return
    backends = [arguments.backend] if arguments.backend else BACKENDS
    for backend in backends:
        # Keras reads KERAS_BACKEND once, when it is imported: a process for each.
        command = [sys.executable, "-m", "sweeps.layers", *sys.argv[1:]]
        command += [] if arguments.backend else ["--backend", backend]
        subprocess.run(
            command, env={**os.environ, "KERAS_BACKEND": backend}, check=True
        )
    if arguments.out == RESULTS:
        layer_table.write()


def sweep(arguments: Any) -> None:
    """Measures on the current backend, and stores each case as soon as it is done."""
    import keras

    import keras_mp
    from sweeps.layer_cases import cases
    from sweeps.layer_gradients import MODES

    # We warn about a lower loss scale, and Keras about hard inputs.
    warnings.simplefilter("ignore")
    backend = keras.backend.backend()
    ours = {"float16": keras_mp.MixedFloat16(), "bfloat16": keras_mp.MixedBFloat16()}
    modes = arguments.modes or (*MODES, "fit")
    for case in cases(backend):
        if arguments.only in case.name:
            print(backend, case.name, flush=True)
            measured = _measured(case, ours, modes)
            _store(arguments.out, {backend: {"cases": {case.name: measured}}})
    versions = {n: importlib.metadata.version(n) for n in ("keras", backend)}
    _store(arguments.out, {backend: {"versions": versions}})


def _measured(case: Any, ours: dict[str, Any], modes: Any) -> dict[str, Any]:
    import keras_mp
    from sweeps.layer_errors import built, run
    from sweeps.layer_fit import fit, fits
    from sweeps.layer_gradients import MODES

    twin = built(case, "float32")
    expected = {}
    for mode in set(MODES) & set(modes):
        try:
            expected[mode] = run(case, twin, mode)
        except Exception:  # Such as text under XLA: there is nothing to compare.
            continue
    fitted = "fit" in modes and fits(case) and fit(case, "float32").status == "ok"
    results: dict[str, Any] = {}
    for dtype in DTYPES:
        results[dtype] = {}
        for name, policy in (("stock", f"mixed_{dtype}"), ("ours", ours[dtype])):
            if name == "stock":
                keras_mp.uninstall()
            try:
                by_mode = _by_mode(case, dtype, policy, twin, expected)
                if fitted:
                    by_mode["fit"] = fit(case, policy)
            finally:
                keras_mp.install()
            results[dtype][name] = {m: _plain(o) for m, o in by_mode.items()}
    return results


def _by_mode(
    case: Any, dtype: str, policy: Any, twin: Any, expected: dict[str, Any]
) -> dict[str, Any]:
    from sweeps.layer_errors import Outcome, built, first_line, outcome

    try:
        layer = built(case, policy, twin)
    except Exception as error:  # Even its first call fails.
        failed = Outcome("raises", message=first_line(error))
        return dict.fromkeys(expected, failed)
    return {m: outcome(case, dtype, layer, x, m) for m, x in expected.items()}


def _plain(outcome: Any) -> dict[str, Any]:
    """The entries of an outcome that have a value, errors with two digits."""
    return {
        key: float(f"{value:.2g}") if isinstance(value, float) else value
        for key, value in dataclasses.asdict(outcome).items()
        if value not in (None, "")
    }


def _store(path: pathlib.Path, news: dict[str, Any]) -> None:
    everything = json.loads(path.read_text()) if path.exists() else {}
    _update(everything, news)
    for measured in everything.values():
        for name, case in measured.get("cases", {}).items():
            measured["cases"][name] = OK if _is_ok(case) else case
    path.write_text(as_text(everything))


def _is_ok(case: Any) -> bool:
    """Is it what it is in float32, whatever the dtype, the policy and the way?"""
    if isinstance(case, dict) and "status" not in case:
        return all(map(_is_ok, case.values()))
    return case == OK or case["status"] == OK


def as_text(results: dict[str, Any]) -> str:
    """The results as JSON, one case a line."""
    backends = []
    for backend, measured in sorted(results.items()):
        cases = ",\n".join(
            f"   {json.dumps(name)}: {json.dumps(case, sort_keys=True)}"
            for name, case in sorted(measured.get("cases", {}).items())
        )
        versions = json.dumps(measured.get("versions", {}), sort_keys=True)
        backends.append(
            f' "{backend}": {{\n  "cases": {{\n{cases}\n  }},\n'
            f'  "versions": {versions}\n }}'
        )
    return "{\n" + ",\n".join(backends) + "\n}\n"


def _update(old: dict[str, Any], new: dict[str, Any]) -> None:
    for key, value in new.items():
        # An outcome is replaced as a whole.
        if isinstance(value, dict) and "status" not in value:
            if not isinstance(old.get(key), dict):
                old[key] = {}
            _update(old[key], value)
        else:
            old[key] = value


if __name__ == "__main__":
    main()
