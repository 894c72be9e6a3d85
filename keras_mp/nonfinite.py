"""Which variables' gradients were not finite: counts that stay on the device.

Four rows, a column for each variable: in how many steps its gradient was not finite, in
how many of them it held an infinity, in how many a nan, and the first one (0: never).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from keras import ops

ROWS = 4


@dataclasses.dataclass(frozen=True)
class NonfiniteGradient:
    """What `nonfinite_report` says of one variable."""

    path: str
    count: int
    first_step: int
    kind: str


def counted(counts: Any, flags: Any, step: Any) -> Any:
    """Returns the counts after a step.

    Args:
        counts: integer tensor of shape (4, variables).
        flags: bool tensor of shape (2, variables), infinities and nans of the step.
        step: integer scalar, the step's number from 1.
    """
    flags = ops.cast(flags, counts.dtype)
    seen = ops.max(flags, axis=0)
    first = ops.where(counts[3] == 0, seen * ops.cast(step, counts.dtype), counts[3])
    more = ops.concatenate([seen[None], flags], axis=0)
    return ops.concatenate([counts[:3] + more, first[None]], axis=0)


def report(counts: Any, variables: Sequence[Any]) -> list[NonfiniteGradient]:
    """Returns a line for each variable with a count, most often first."""
    columns = zip(variables, *ops.convert_to_numpy(counts).tolist(), strict=True)
    lines = [
        NonfiniteGradient(
            path=getattr(variable, "path", variable.name),
            count=count,
            first_step=first,
            kind=", ".join(k for k, n in (("inf", infinite), ("nan", nan)) if n),
        )
        for variable, count, infinite, nan, first in columns
        if count
    ]
    return sorted(lines, key=lambda line: -line.count)
