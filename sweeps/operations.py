"""Every operation of `keras.ops` in half precision, beside itself in float32.

For each the first way to call it is taken that works in float32 (`FORMS`), with values
that half precision holds: usual ones, small ones and zeros. Outputs and the gradient of
a sum of them are compared. What raises is what a layer of the user's is kept in float32
for; what is not finite, or wrong, computes so in silence.

`python -m sweeps.operations` measures on every backend and writes `operations.txt`.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_mp.backends.differentiation import differentiate
from sweeps.layer_errors import LAMBDA, ROUNDINGS, SMALLEST, UNIT_ROUNDOFF
from sweeps.table import BACKEND, BACKENDS

REPORT = pathlib.Path(__file__).with_suffix(".txt")
_DRAW = np.random.default_rng(0)
X = _DRAW.uniform(0.1, 0.9, size=(4, 4)) * _DRAW.choice([-1.0, 1.0], size=(4, 4))
SCALES = {"usual": 1.0, "small": 1e-3, "zeros": 0.0}


def _image(x: Any) -> Any:
    return ops.reshape(x, (1, 4, 4, 1))


def _positive(x: Any) -> Any:
    return ops.matmul(x, ops.transpose(x)) + ops.cast(ops.eye(4), x.dtype)


FORMS: list[Callable[[Callable, Any], Any]] = [
    lambda operation, x: operation(x),
    lambda operation, x: operation(ops.abs(x)),
    lambda operation, x: operation(_positive(x)),
    lambda operation, x: operation(x, ops.flip(x)),
    lambda operation, x: operation(ops.abs(x), ops.abs(ops.flip(x))),
    lambda operation, x: operation(x > 0, x, ops.flip(x)),
    lambda operation, x: operation([x, ops.flip(x)]),
    lambda operation, x: operation((x, ops.flip(x))),
    lambda operation, x: operation(x, 1),
    lambda operation, x: operation(x, 0, 1),
    lambda operation, x: operation(x, (4, 4)),
    lambda operation, x: operation(x, [16]),
    lambda operation, x: operation(x, -0.5, 0.5),
    lambda operation, x: operation("ij,jk->ik", x, x),
    lambda operation, x: operation(_image(x), 2),
    lambda operation, x: operation(_image(x), ops.ones((2, 2, 1, 1), x.dtype)),
    lambda operation, x: operation(ops.reshape(x, (16,)), 8, 4, 8),
    lambda operation, x: operation(*[ops.reshape(x, (1, 4, 2, 2))] * 3),
    lambda operation, x: operation(ops.reshape(x, (16,)), ops.arange(16), 4),
]
# They take functions, make no tensors of what they get, or leave these undefined.
LEFT_OUT = (
    "associative_scan cond convert_to_numpy custom_gradient device_scope empty "
    "empty_like fori_loop jvp map scan switch unravel_index vectorize vectorized_map "
    "while_loop cast saturate_cast convert_to_tensor"
).split()


def names() -> Iterator[str]:
    """The operations: what of `keras.ops` is a function."""
    for name, value in sorted(vars(ops).items()):
        function = callable(value) and not isinstance(value, type)
        if function and not name.startswith("_") and name not in LEFT_OUT:
            yield name


def computed(form: Callable, operation: Callable, x: Any, dtype: str) -> list[Any]:
    """The floats that an operation returns, and the gradient of a sum of them by x."""
    variable = keras.Variable(x.astype("float32"))

    def loss(_: Any, see: Callable) -> Any:
        result = form(operation, ops.cast(variable.value, dtype))
        floats = [
            see(y)[0]
            for y in keras.tree.flatten(result)
            if ops.is_tensor(y) and keras.backend.is_float_dtype(y.dtype)
        ]
        if not floats:
            raise ValueError("It returns no floats.")
        # Weighted: the sum of a softmax has no gradient.
        return sum(ops.sum(ops.cast(y, "float32") * _weights(y)) for y in floats)

    found = differentiate(loss, (), [variable], [variable], compiled=True)
    return [*found.seen, found.by_variable[0]]


def _weights(y: Any) -> Any:
    return ops.reshape(ops.linspace(0.5, 1.5, int(np.prod(y.shape))), y.shape)


def outcome(name: str, dtype: str) -> str:
    """What is wrong with an operation in half precision; empty if nothing is."""
    operation, wrong = getattr(ops, name), []
    form = _form(operation)
    if form is None:
        return "not called"
    for scale, factor in SCALES.items():
        # Values that the dtype holds, in float32.
        x = ops.convert_to_numpy(ops.cast(ops.cast(X * factor, dtype), "float32"))
        try:
            wanted = computed(form, operation, x, "float32")
        except Exception:  # Zeros may be no input for it.
            continue
        try:
            found = computed(form, operation, x, dtype)
        except Exception as error:  # The table shows it, of whatever kind.
            wrong.append(f"{scale}: raises {type(error).__name__}")
            continue
        pairs = [*zip(found, wanted, strict=True)]
        for i, (value, expected) in enumerate(pairs):
            what = "gradient" if i == len(pairs) - 1 else "result"
            wrong += [f"{scale}: {what} {x}" for x in _wrong(value, expected, dtype)]
    return "; ".join(dict.fromkeys(wrong))


def _form(operation: Callable) -> Callable | None:
    for form in FORMS:
        try:
            values = computed(form, operation, X, "float32")[:-1]
        except Exception:  # The next one may be a way to call it.
            continue
        if values and all(np.isfinite(value).all() for value in values):
            return form
    return None


def _wrong(value: Any, expected: Any, dtype: str) -> Iterator[str]:
    if value is None or expected is None or not np.isfinite(expected).all():
        return
    if value.shape != expected.shape:  # It depends on the values.
        yield f"of shape {value.shape}, not {expected.shape}"
        return
    largest = np.max(np.abs(expected), initial=0.0)
    if not np.isfinite(value).all():
        yield f"not finite where float32 is at most {largest:.2g}"
        return
    tolerance = LAMBDA * ROUNDINGS**0.5
    error = np.max(np.abs(value - expected), initial=0.0)
    if error > tolerance * (UNIT_ROUNDOFF[dtype] * largest + SMALLEST[dtype]):
        yield f"off by {error:.2g} of {largest:.2g}"


def measure() -> None:
    """Prints what is wrong on this backend."""
    for dtype in UNIT_ROUNDOFF:
        outcomes = {name: outcome(name, dtype) for name in names()}
        ok = [name for name, wrong in outcomes.items() if not wrong]
        called = [x for x, wrong in outcomes.items() if wrong != "not called"]
        print(f"{BACKEND}, {dtype}: {len(ok)} of {len(called)} compute as in float32")
        for name in called:
            if outcomes[name]:
                print(f"  {name}: {outcomes[name]}")
        rest = [name for name in outcomes if name not in called]
        print(f"  not called: {' '.join(rest)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m sweeps.operations")
    parser.add_argument("--backend", choices=BACKENDS, help="all three unless given")
    arguments = parser.parse_args()
    if arguments.backend == BACKEND:
        warnings.simplefilter("ignore")
        measure()
        sys.exit()
    reports = []
    for backend in [arguments.backend] if arguments.backend else BACKENDS:
        command = [sys.executable, "-m", "sweeps.operations", "--backend", backend]
        environment = {**os.environ, "KERAS_BACKEND": backend}
        found = subprocess.run(
            command, env=environment, stdout=-1, text=True, check=True
        )
        reports.append(found.stdout)
    REPORT.write_text("".join(reports))
