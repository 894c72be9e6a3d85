"""`python -m sweeps.layers`: every layer in half precision, under stock Keras and ours.

Each case (`layer_cases`) runs in float32 and then under Keras' own mixed policies and
keras_mp's: forward and gradients eagerly and compiled, and two steps of `fit`. Results
go to layers.json, one section a backend, and from there into README.md.
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

HERE = pathlib.Path(__file__).parent
BACKENDS = ("jax", "tensorflow", "torch")
DTYPES = ("float16", "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sweeps.layers")
    parser.add_argument("--backend", choices=BACKENDS, help="all three unless given")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "layers.json")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    arguments = parser.parse_args()
    for backend in [arguments.backend] if arguments.backend else BACKENDS:
        # Keras reads KERAS_BACKEND once, when it is imported: a process for each.
        if os.environ.get("KERAS_BACKEND") == backend and arguments.backend:
            _merge(arguments.out, backend, swept(arguments.only))
        else:
            command = [sys.executable, "-m", "sweeps.layers", "--backend", backend]
            command += ["--out", str(arguments.out), "--only", arguments.only]
            subprocess.run(
                command, env={**os.environ, "KERAS_BACKEND": backend}, check=True
            )
    if not arguments.backend and arguments.out == HERE / "layers.json":
        from sweeps.layer_table import write

        write()


def swept(only: str = "") -> dict[str, Any]:
    """Versions, and for each case what became of it, on the backend that runs."""
    import keras

    import keras_mp
    from sweeps.layer_cases import cases

    warnings.simplefilter("ignore")  # Of ours, that a scale has come down.
    backend = keras.backend.backend()
    ours = {"float16": keras_mp.MixedFloat16(), "bfloat16": keras_mp.MixedBFloat16()}
    results = {}
    for case in cases(backend):
        if only in case.name:
            print(backend, case.name, flush=True)
            results[case.name] = _measured(case, ours)
    return {
        "versions": {
            name: importlib.metadata.version(name) for name in ("keras", backend)
        },
        "cases": results,
    }


def _measured(case: Any, ours: dict[str, Any]) -> dict[str, Any]:
    import keras_mp
    from sweeps.gradients import MODES
    from sweeps.layer_errors import built, outcome, run
    from sweeps.layer_fit import fit, fits

    twin = built(case, "float32")
    expected = {}
    for mode in MODES:
        try:
            expected[mode] = run(case, twin, mode)
        except Exception:  # As text under XLA: then there is nothing to compare.
            continue
    fitted = fits(case) and fit(case, "float32").status == "ok"
    results: dict[str, Any] = {}
    for dtype in DTYPES:
        results[dtype] = {}
        for name, policy in (("stock", f"mixed_{dtype}"), ("ours", ours[dtype])):
            if name == "stock":
                keras_mp.integration.uninstall()
            try:
                by_mode = {
                    mode: outcome(case, dtype, policy, (twin, expected[mode]), mode)
                    for mode in expected
                }
                if fitted:
                    by_mode["fit"] = fit(case, policy)
            finally:
                keras_mp.integration.install()
            results[dtype][name] = {m: _plain(o) for m, o in by_mode.items()}
    return results


def _plain(outcome: Any) -> dict[str, Any]:
    """What there is to say of an outcome, errors with two digits."""
    return {
        key: float(f"{value:.2g}") if isinstance(value, float) else value
        for key, value in dataclasses.asdict(outcome).items()
        if value not in (None, "")
    }


def _merge(path: pathlib.Path, backend: str, section: dict[str, Any]) -> None:
    everything = json.loads(path.read_text()) if path.exists() else {}
    everything[backend] = section
    text = json.dumps(everything, indent=1, sort_keys=True)
    path.write_text(text + "\n")


if __name__ == "__main__":
    main()
