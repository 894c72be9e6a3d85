"""Which variables' gradients were not finite: counts that stay on the device.

Five rows, a column for each variable: in how many steps its gradient was not finite, in
how many of them it held an infinity, in how many a nan, and the numbers of the first
and of the last of these steps (0: never).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_mp.backends.step import INFINITE, NAN
from keras_mp.policies.paths import variable_path
from keras_mp.types import Variables

ROWS = 5
# How many of the variables concerned a message names.
NAMED = 3


class NonfiniteGradient(NamedTuple):
    """What `nonfinite_report` says about one variable."""

    path: str
    count: int  # type: ignore[assignment]  # Hides tuple.count, which is not needed.
    first_step: int
    kind: str


def counted(counts: Any, codes: Any, applied: Any, skipped: Any) -> Any:
    """Returns the counts after a step.

    Args:
        counts: integer tensor of shape (5, variables).
        codes: integer tensor: what `engine.nonfinite` found in the gradient of each
            variable; entries after those are ignored.
        applied: integer scalar, steps that were applied before this one.
        skipped: integer scalar, steps that were skipped before it.
    """
    codes = ops.cast(codes[: counts.shape[1]], counts.dtype)
    step = ops.cast(applied + skipped + 1, counts.dtype)
    unset = ops.less(ops.bitwise_and(counts, _FIRST_STEP), _A_STEP)
    later = ops.where(unset, step, ops.add(counts, _A_COUNT))
    concerned = ops.greater(ops.bitwise_and(codes, _CONCERNED_BY), 0)
    return ops.where(concerned, later, counts)


def _for_each_row(*values: int) -> np.ndarray:
    return np.array(values, "int32")[:, np.newaxis]


# One value for each row: the bits of the codes that it counts; 1 if it counts steps; 1
# if it holds a step's number; and all bits set if it keeps its first number.
_ANY = INFINITE | NAN
_CONCERNED_BY = _for_each_row(_ANY, INFINITE, NAN, _ANY, _ANY)
_A_COUNT = _for_each_row(1, 1, 1, 0, 0)
_A_STEP = _for_each_row(0, 0, 0, 1, 1)
_FIRST_STEP = _for_each_row(0, 0, 0, -1, 0)


def report(counts: Any, variables: Variables) -> list[NonfiniteGradient]:
    """Returns a line for each variable with a count, the highest count first."""
    columns = zip(variables, *ops.convert_to_numpy(counts).tolist(), strict=True)
    lines = [
        NonfiniteGradient(variable_path(variable), count, first, _kind(infinite, nan))
        for variable, count, infinite, nan, first, _ in columns
        if count
    ]
    return sorted(lines, key=lambda line: -line.count)


def added(
    before: np.ndarray, after: np.ndarray, paths: Sequence[str]
) -> dict[str, str]:
    """Returns path -> kind for the variables whose counts are above `before`."""
    more = (after - before)[:3].tolist()
    return {
        path: _kind(infinite, nan)
        for path, count, infinite, nan in zip(paths, *more, strict=True)
        if count
    }


def newest(counts: Any, variables: Variables) -> list[str]:
    """Returns the paths of the variables that the last such step names, in order."""
    last = ops.convert_to_numpy(counts)[4].tolist()
    return [
        variable_path(variable)
        for variable, step in zip(variables, last, strict=True)
        if step and step == max(last)
    ]


def newest_step(counts: Any, variables: Variables) -> tuple[int, str]:
    """Returns the number of the last such step, and what was not finite and where.

    Such as "inf in conv2d/bias"; "inf, nan" if a variable has had both so far.
    """
    rows = ops.convert_to_numpy(counts)
    last = rows[4] == rows[4].max()
    kind = _kind(int(rows[1][last].sum()), int(rows[2][last].sum()))
    return int(rows[4].max()), f"{kind} in {named(newest(counts, variables))}"


def named(paths: Sequence[str]) -> str:
    """The first of these paths, as a message lists them."""
    more = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
    return ", ".join(paths[:NAMED]) + more


def _kind(infinite: int, nan: int) -> str:
    return ", ".join(k for k, n in (("inf", infinite), ("nan", nan)) if n)
