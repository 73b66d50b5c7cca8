"""Shares: parts of a whole that need not be equal. They size the blocks of a message and the shards of a model."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mimatrix.core.errors import UnsuitedError, UserError


@dataclass(frozen=True, slots=True)
class Shares:
    """Fractions that sum to one. Some may be zero: such a part has a place but is empty."""

    fractions: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.fractions or not all(0 <= part <= 1 for part in self.fractions):
            raise UserError("shares must be numbers from 0 to 1; write for example 0.5,0.25,0.25")
        if not math.isclose(math.fsum(self.fractions), 1.0, rel_tol=1e-9):
            raise UserError(
                f"shares must sum to 1, got {math.fsum(self.fractions):.6g}; use Shares.of to scale weights"
            )

    @classmethod
    def of(cls, weights: Iterable[float]) -> "Shares":
        """Return shares in proportion to `weights`."""
        parts = [float(weight) for weight in weights]
        if not all(math.isfinite(part) and part >= 0 for part in parts) or not any(parts):
            raise UserError("weights must be finite, not negative and not all zero; write for example 4,4,1,1")
        # Against the largest first: the sum of huge weights could overflow, that of tiny ones vanish.
        largest = max(parts)
        scaled = [part / largest for part in parts]
        total = math.fsum(scaled)
        return cls(tuple(part / total for part in scaled))

    @classmethod
    def equal(cls, count: int) -> "Shares":
        """Return `count` equal shares."""
        return cls((1.0 / count,) * count)

    def __len__(self) -> int:
        return len(self.fractions)

    def ends(self) -> NDArray[np.float64]:
        """Return the start of each part as a fraction of the whole, then 1: part b is [ends[b], ends[b+1])."""
        sums = np.concatenate(([0.0], np.cumsum(self.fractions)))
        # Divided, not set: so that empty parts at the end stay empty when the sum is rounded.
        ends: NDArray[np.float64] = sums / sums[-1]
        return ends

    def cut(self, count: int) -> tuple[int, ...]:
        """Cut `count` elements into integer parts that sum to it exactly; each is within one element of its share."""
        return _cut(self, count)

    def for_blocks(self, owners: Sequence[int]) -> "Shares":
        """Turn shares of ranks into shares of blocks: a rank's share is spread evenly over the blocks that it owns.

        Shares of ranks that own no block fall to the others in proportion.
        """
        if max(owners) >= len(self):
            raise UserError(f"{len(self)} shares are too few for {max(owners) + 1} ranks; give one share for each rank")
        if tuple(owners) == tuple(range(len(self))):
            return self  # as it is: scaling would round, and where a part ends be another element
        blocks_of = np.bincount(owners, minlength=len(self))
        weights = [self.fractions[owner] / blocks_of[owner] for owner in owners]
        if not any(weights):
            raise UnsuitedError("every rank that owns a block has the share 0; give one of them more")
        return Shares.of(weights)


@lru_cache(maxsize=4096)
def _cut(shares: Shares, count: int) -> tuple[int, ...]:
    """Compute `Shares.cut`; cached, because collectives on the same tensors ask for it again and again."""
    ends = np.floor(shares.ends() * count + 0.5).astype(np.int64)
    return tuple(int(size) for size in np.diff(ends))
