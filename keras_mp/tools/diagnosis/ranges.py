"""The range of a tensor's magnitudes, compared with a dtype's range, in NumPy.

A range counts magnitudes by exponents: exponent e stands for 2^e <= |x| < 2^(e+1), as
figure 3 of Micikevicius et al., Mixed Precision Training, 2018, shows gradients. A
loss scale of 2^k moves them by k, so one range answers for every scale.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

LOWEST, HIGHEST = -150, 128  # Wider than float32's exponents, so that all count.
_EXPONENTS = np.arange(LOWEST, HIGHEST + 1)


@dataclasses.dataclass(frozen=True)
class Format:
    """The magnitudes that a dtype holds."""

    name: str
    largest: float
    lowest_normal: int  # The exponent of its smallest normal number.
    lowest: int  # The exponent of its smallest number.

    @property
    def highest(self) -> int:
        """The exponent of its largest number."""
        return math.frexp(self.largest)[1] - 1


FLOAT16 = Format("float16", 65504.0, -14, -24)
# The largest bfloat16 is 2^128 (1 - 2^-8), its subnormal numbers end at 2^-133.
BFLOAT16 = Format("bfloat16", float(2.0**128 * (1 - 2.0**-8)), -126, -133)
FORMATS = {f.name: f for f in (FLOAT16, BFLOAT16)}


@dataclasses.dataclass(frozen=True, eq=False)
class Range:
    """How large the elements of one or several tensors are.

    Attributes:
        size: the number of elements.
        zeros, nans, infinities: how many elements are 0, nan and infinite.
        smallest, largest: among magnitudes that are finite and not 0; 0 if none is.
        counts: the number of magnitudes of each exponent, from LOWEST to HIGHEST.
        sums: the sum of the magnitudes of each exponent.
    """

    size: int
    zeros: int
    nans: int
    infinities: int
    smallest: float
    largest: float
    counts: np.ndarray
    sums: np.ndarray

    @property
    def finite(self) -> bool:
        return not self.nans and not self.infinities

    @property
    def histogram(self) -> dict[int, int]:
        """Exponent -> number of elements, without those that do not occur."""
        return {
            int(e): int(n) for e, n in zip(_EXPONENTS, self.counts, strict=True) if n
        }

    @property
    def shares(self) -> dict[int, float]:
        """Exponent -> share of all elements, without those that do not occur."""
        return {e: self._share(n) for e, n in self.histogram.items()}

    def overflowing(self, format: Format, scale: float = 1.0) -> float:
        """The share of all elements that, times `scale`, `format` cannot hold."""
        above = self.counts[_shifted(scale) > format.highest].sum()
        # Numbers above the largest one may have its exponent.
        above = max(above, int(self.largest * scale > format.largest))
        return self._share(above + self.nans + self.infinities)

    def subnormal(self, format: Format, scale: float = 1.0) -> float:
        """The share of all elements that `format` holds with fewer bits."""
        exponents = _shifted(scale)
        within = (exponents < format.lowest_normal) & (exponents >= format.lowest)
        return self._share(self.counts[within].sum())

    def vanishing(self, format: Format, scale: float = 1.0) -> float:
        """The share of all elements that are not 0 and become 0 in `format`.

        Elements whose exponent is one below that of the smallest number round up to it.
        """
        return self._share(self.counts[_shifted(scale) < format.lowest - 1].sum())

    def lost(self, format: Format, scale: float = 1.0) -> float:
        """The share of the sum of all magnitudes that becomes 0."""
        total = self.sums.sum()
        gone = self.sums[_shifted(scale) < format.lowest - 1].sum()
        return float(gone / total) if total else 0.0

    def headroom(self, format: Format, scale: float = 1.0) -> tuple[int, int]:
        """Powers of two left above the largest element and below the smallest one.

        Negative if an element does not fit; 0 and 0 for a range without magnitudes.
        """
        if not self.largest:
            return 0, 0
        top = math.floor(math.log2(format.largest) - math.log2(self.largest * scale))
        bottom = math.floor(math.log2(self.smallest * scale)) - format.lowest
        return top, bottom

    def _share(self, count: Any) -> float:
        return float(count) / self.size if self.size else 0.0


def range_of(array: Any) -> Range:
    """The range of one array of floating-point numbers."""
    values = np.abs(np.asarray(array)).ravel()
    if values.dtype.itemsize < 4 or values.dtype.kind not in "f":
        values = values.astype("float32")
    finite = np.isfinite(values)
    magnitudes = values[finite & (values > 0)]
    exponents = np.clip(np.frexp(magnitudes)[1] - 1, LOWEST, HIGHEST) - LOWEST
    length = len(_EXPONENTS)
    wide = magnitudes.astype("float64")
    return Range(
        size=values.size,
        zeros=int(np.count_nonzero(values == 0)),
        nans=int(np.count_nonzero(np.isnan(values))),
        infinities=int(np.count_nonzero(np.isinf(values))),
        smallest=float(magnitudes.min()) if magnitudes.size else 0.0,
        largest=float(magnitudes.max()) if magnitudes.size else 0.0,
        counts=np.bincount(exponents, minlength=length),
        sums=np.bincount(exponents, weights=wide, minlength=length),
    )


def joined(ranges: Iterable[Range]) -> Range:
    """The range of all elements of several tensors together."""
    every = [range_of(np.zeros(0, "float32")), *ranges]
    added = ("size", "zeros", "nans", "infinities", "counts", "sums")
    return Range(
        **{name: sum(getattr(range, name) for range in every) for name in added},
        smallest=min((r.smallest for r in every if r.smallest), default=0.0),
        largest=max(r.largest for r in every),
    )


def _shifted(scale: float) -> np.ndarray:
    return _EXPONENTS + math.floor(math.log2(scale))
