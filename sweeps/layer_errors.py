"""The errors of one layer in half precision, against the same layer in float32.

The tolerance of a result is 6 sqrt(n) (u m + s): m is the largest magnitude of the
float32 result, u the dtype's unit roundoff, s its smallest number, and n = 8 the number
of roundings to it in a row. Rounding errors are nearly independent, so n of them
in a row add up to about sqrt(n) u and, but for one result in 10^7, to no more than
6 sqrt(n) u (Higham and Mary, A new approach to probabilistic rounding error analysis,
2019, Theorem 2.4: beyond lambda sqrt(n) u with a probability of at most
2 exp(-lambda^2 / 2)). Between input, weights, result and gradient no layer of Keras
rounds more often in a row, as long as sums are made in float32 and rounded once: how
many terms a sum has must not matter, and n is one number for all.
"""

import dataclasses
import math
import re
from typing import Any

import keras
import numpy as np
from keras import tree

from sweeps.layer_cases import Case
from sweeps.layer_gradients import called

UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133}
LAMBDA = 6.0
ROUNDINGS = 8
STATUSES = ("ok", "error", "not finite", "raises")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of one run.

    Attributes:
        status: "ok", "error" (beyond tolerance), "not finite" (where float32 is) or
            "raises".
        output: the largest error of an output, relative to its largest magnitude in
            float32; None without an output.
        gradient: the same for the gradients.
        where: the worst output or gradient, unless the status is "ok".
        message: the exception, or how much is not finite.
    """

    status: str
    output: float | None = None
    gradient: float | None = None
    where: str = ""
    message: str = ""


def tolerance(dtype: str, size: float) -> float:
    """The largest error that rounding explains, of results as large as `size`."""
    rounding = UNIT_ROUNDOFF[dtype] * size + SMALLEST[dtype]
    return LAMBDA * math.sqrt(ROUNDINGS) * rounding


def built(case: Case, policy: Any, like: Any = None) -> Any:
    """The case's layer under a policy, called once, with the state of another one."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(0)
    try:
        layer = case.layer()
        if case.adapt is not None:
            layer.adapt(case.adapt())
        _call_once(layer, case)
    finally:
        keras.config.set_dtype_policy(before)
    if like is not None:
        for variable, value in zip(layer.variables, like.variables, strict=True):
            # Copied: on torch NumPy's array is the variable's own memory.
            variable.assign(np.array(keras.ops.convert_to_numpy(value)))
    return layer


def _call_once(layer: Any, case: Case) -> None:
    args = case.inputs()
    if keras.backend.backend() != "torch" and not _has_text(args):
        # Traced, not run: JAX would compile each operation by itself, and TensorFlow
        # would take the steps of a recurrent layer one by one.
        args = tree.map_structure(lambda x: keras.KerasTensor(x.shape, x.dtype), args)
    layer(*args, **case.options())


def _has_text(args: Any) -> bool:
    return any(x.dtype.kind not in "fiub" for x in tree.flatten(args))


def outcome(case: Case, dtype: str, layer: Any, expected: Any, mode: str) -> Outcome:
    """Runs a layer, and compares the result with that in float32.

    Args:
        case: the arguments of the layer.
        dtype: the half dtype, for the tolerance.
        layer: the built layer under a half policy.
        expected: what `run` returned for it in float32.
        mode: one of `gradients.MODES`.
    """
    try:
        actual = run(case, layer, mode)
    except Exception as error:  # The table shows it, of whatever kind.
        return Outcome("raises", message=first_line(error))
    return compared(case, dtype, expected, actual)


def run(case: Case, layer: Any, mode: str) -> Any:
    return called(layer, case.inputs(), dict(case.options()), mode, case.gradient)


def first_line(error: Exception) -> str:
    """The type of an exception, and the first line that says something."""
    text = re.sub(r"\x1b\[\d*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith("Exception encountered")]
    return f"{type(error).__name__}: {(said or lines or [''])[0]}"[:160]


def compared(case: Case, dtype: str, expected: Any, actual: Any) -> Outcome:
    """Compares outputs and gradients with those in float32."""
    worst: dict[str, Any] = {"status": "ok"}
    largest: list[float | None] = [None, None]
    for kind in (0, 1):
        for name, reference in expected[kind].items():
            if name not in actual[kind]:
                status, error, message = "error", None, "there is none"
            else:
                status, error, message = _difference(
                    case, dtype, reference, actual[kind][name]
                )
            if error is not None:
                largest[kind] = max(error, largest[kind] or 0.0)
            if STATUSES.index(status) > STATUSES.index(worst["status"]):
                worst = {"status": status, "where": name, "message": message}
    return Outcome(output=largest[0], gradient=largest[1], **worst)


def _difference(
    case: Case, dtype: str, expected: np.ndarray, actual: np.ndarray
) -> tuple[str, float | None, str]:
    """Status, error relative to the largest magnitude in float32, message."""
    if expected.shape != actual.shape:
        return "error", None, f"shape {actual.shape}, not {expected.shape}"
    if expected.dtype.kind != "f":
        wrong = float(np.mean(expected != actual))
        return ("error", wrong, f"{wrong:.0%} differ") if wrong else ("ok", 0.0, "")
    defined = np.isfinite(expected)
    lost = defined & ~np.isfinite(actual)
    if lost.any():
        return "not finite", None, f"{lost.sum() / defined.sum():.0%} of it"
    expected, actual = expected[defined], actual[defined]
    size = float(np.abs(expected).max(initial=0.0))
    limit = tolerance(dtype, size)
    if case.random_draws:
        # Another dtype draws other numbers: the means must agree, within six standard
        # errors of their difference.
        limit += LAMBDA * float(np.std(expected)) * math.sqrt(2 / case.random_draws)
        expected, actual = np.mean(expected), np.mean(actual)
    error = float(np.abs(actual - expected).max(initial=0.0))
    fine = error <= limit or bool(case.finite_only)
    return ("ok" if fine else "error"), error / (size or 1.0), ""
