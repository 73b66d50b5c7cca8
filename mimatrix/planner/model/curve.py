"""A measured quantity against the samples of a micro-batch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from mimatrix.core.errors import UserError
from mimatrix.planner.model.pchip import pchip

Floats = NDArray[np.float64]
_MOST = 1 << 24


@dataclass(frozen=True)
class Curve:
    """A quantity that never falls: the running maximum of what was measured, by PCHIP, up to the last point.

    `points` are (samples, value) as measured, samples rising from 1 or more. At 0 samples it is 0.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes[0] < 1 or any(left >= right for left, right in pairwise(sizes)):
            raise UserError(f"a curve has batch sizes {sizes}; measure one or more, in rising order from 1")
        if sizes[-1] > _MOST:
            raise UserError(f"a curve goes to {sizes[-1]} samples; measure {_MOST} at the most")
        if not all(np.isfinite(value) and value >= 0 for _, value in self.points):
            raise UserError(f"a curve has the values {[value for _, value in self.points]}; they cannot be negative")

    @classmethod
    def of(cls, points: Iterable[Sequence[float]]) -> "Curve":
        """Make a curve of pairs in any order."""
        return cls(tuple(sorted((int(size), float(value)) for size, value in points)))

    @property
    def most(self) -> int:
        """The largest batch that was measured; beyond it the value is unknown."""
        return self.points[-1][0]

    @cached_property
    def table(self) -> Floats:
        """The values at 0, 1, ... `most` samples."""
        sizes = [size for size, _ in self.points]
        values = list(accumulate((value for _, value in self.points), max))
        table = np.full(self.most + 1, values[0])
        if len(sizes) > 1:
            # Rounding may leave a hair's breadth of a fall between two points.
            table[sizes[0] :] = np.maximum.accumulate(pchip(sizes, values))
        table[0] = 0.0
        return table

    def at(self, samples: int) -> float:
        """Return the value at this number of samples, which must not be beyond what was measured."""
        if not 0 <= samples <= self.most:
            raise UserError(f"{samples} samples are beyond the {self.most} that were measured; measure more")
        return float(self.table[samples])

    def largest(self, limit: float) -> int:
        """Return the most samples whose value is `limit` or less; 0 if even one has more."""
        return max(0, int(np.searchsorted(self.table, limit, side="right")) - 1)

    def scaled(self, factor: float) -> "Curve":
        """Return the curve with all values times `factor`."""
        return Curve(tuple((size, value * factor) for size, value in self.points))
