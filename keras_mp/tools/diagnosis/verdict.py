"""What ranges mean for float16 and bfloat16: what overflows, and what underflows.

It only computes with ranges. Magnitudes are those of float32, where nothing is lost.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from keras_mp.tools.diagnosis.ranges import BFLOAT16, FLOAT16, FORMATS, Format, Range

# A gradient counts as lost if a larger share of the sum of its magnitudes becomes 0.
# Rounding to float16 changes each element by up to this much.
LOST = 2.0**-11
# A dynamic loss scale stays between these powers of two by default.
LOWEST_SCALE, HIGHEST_SCALE = 0, 24
_POWERS = range(LOWEST_SCALE, HIGHEST_SCALE + 1)


@dataclasses.dataclass(frozen=True)
class Measured:
    """The range of one tensor in float32."""

    path: str  # The path of the layer or variable.
    kind: str  # "output", "activation gradient" or "gradient".
    range: Range  # With a loss scale of 1.
    half: bool  # Is it in half precision under the policy?
    # The path that `float32=` takes; empty if it belongs to a model or an operation.
    layer: str = ""

    @property
    def is_gradient(self) -> bool:
        return self.kind != "output"

    def headroom(self, loss_scale: float) -> tuple[int, int]:
        """See `Range.headroom`, in float16."""
        return self.range.headroom(FLOAT16, self._scale(loss_scale))

    def lost(self, loss_scale: float) -> float:
        """The share of the sum of its magnitudes that becomes 0 in float16."""
        return self.range.lost(FLOAT16, self._scale(loss_scale))

    def room(self, loss_scale: float) -> float:
        """How well it fits into float16: the less room, the worse."""
        lost = self.is_gradient and self.lost(loss_scale) > LOST
        return self.headroom(loss_scale)[0] - 100 * lost

    def to_dict(self, loss_scale: float) -> dict[str, Any]:
        """All of it as dicts, lists, strings and numbers, for JSON."""
        found, scale = self.range, self._scale(loss_scale)
        return {
            "path": self.path,
            "kind": self.kind,
            "half": self.half,
            "size": found.size,
            "largest": found.largest,
            "smallest": found.smallest,
            "zero": found.zeros / found.size if found.size else 0.0,
            "not_finite": found.nans + found.infinities,
            **{
                name: {
                    "overflowing": found.overflowing(format, scale),
                    "subnormal": found.subnormal(format, scale),
                    "vanishing": found.vanishing(format, scale),
                    "lost": found.lost(format, scale),
                    "headroom": list(found.headroom(format, scale)),
                }
                for name, format in FORMATS.items()
            },
            "histogram": {str(e): n for e, n in found.histogram.items()},
        }

    def _scale(self, loss_scale: float) -> float:
        return loss_scale if self.is_gradient else 1.0


@dataclasses.dataclass(frozen=True)
class Window:
    """The loss scales, powers of two, at which every gradient fits into a format."""

    lowest: int  # The exponent of the smallest scale at which none is lost.
    highest: int  # The exponent of the largest at which none overflows.

    @property
    def is_open(self) -> bool:
        return self.lowest <= self.highest

    def holds(self, scale: float) -> bool:
        return 2.0**self.lowest <= scale <= 2.0**self.highest

    def __str__(self) -> str:
        return f"2^{self.lowest} to 2^{self.highest}"


def window_of(range: Range, format: Format) -> Window:
    """The loss scales at which one gradient fits; `lowest` > `highest` if none does."""
    if not range.largest:
        return Window(LOWEST_SCALE, HIGHEST_SCALE)
    enough = (k for k in _POWERS if range.lost(format, 2.0**k) <= LOST)
    highest = range.headroom(format)[0] if range.finite else LOWEST_SCALE - 1
    return Window(next(enough, HIGHEST_SCALE + 1), min(highest, HIGHEST_SCALE))


def common(windows: Sequence[Window]) -> Window:
    """The loss scales that are in each of these windows."""
    return Window(
        max((w.lowest for w in windows), default=LOWEST_SCALE),
        min((w.highest for w in windows), default=HIGHEST_SCALE),
    )


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What does not fit."""

    # Outputs that pass the largest float16, in the order of the call.
    overflowing: tuple[Measured, ...]
    # The loss scales at which every gradient but the outliers fits into float16.
    window: Window
    # Gradients that overflow, or are lost, at the present scale.
    too_large: tuple[Measured, ...]
    too_small: tuple[Measured, ...]
    outliers: tuple[Measured, ...]  # Gradients that fit at no scale of the window.
    bfloat16: bool  # Do all outputs and gradients, unscaled, fit into bfloat16?

    @property
    def fits(self) -> bool:
        """Does everything fit into float16, at some scale?"""
        return not self.overflowing and not self.outliers


def verdict_on(measured: Sequence[Measured], scale: float) -> Verdict:
    """Judges the ranges of one batch, in the order of `Report.measured`."""
    half = [m for m in measured if m.half]
    gradients = [m for m in half if m.is_gradient and m.range.largest]
    windows = [window_of(m.range, FLOAT16) for m in gradients]
    together = common(windows)
    if not together.is_open:
        # The window around the scale that suits most gradients.
        best = max(_POWERS, key=lambda k: sum(w.holds(2.0**k) for w in windows))
        together = common([w for w in windows if w.holds(2.0**best)])
    return Verdict(
        overflowing=tuple(
            m for m in half if not m.is_gradient and m.range.overflowing(FLOAT16)
        ),
        window=together,
        too_large=tuple(m for m in gradients if m.range.overflowing(FLOAT16, scale)),
        too_small=tuple(m for m in gradients if m.range.lost(FLOAT16, scale) > LOST),
        outliers=tuple(
            m
            for m, w in zip(gradients, windows, strict=True)
            if not common([w, together]).is_open
        ),
        bfloat16=all(
            not m.range.overflowing(BFLOAT16) and m.range.lost(BFLOAT16) <= LOST
            for m in half
        ),
    )


def power(value: float) -> str:
    """A magnitude as a power of two: 2^15 for 32768 to 65535."""
    return f"2^{math.frexp(value)[1] - 1}" if value else "0"
