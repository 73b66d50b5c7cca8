"""Shares of GDRAA's blocks for NICs of unequal rates, by linear programming.

A rank with share f of P ranks sends 1-f and receives f(P-1) of a segment while it is reduced, the other way round
while it is gathered. The first round only reduces, the last only gathers, and the k-1 between do both at once, where a
rank sends and receives 1 + f(P-2) in all. So a slow NIC is best off owning nothing when there are many segments, and an
equal share when there is one. The programme minimises the sum of the rounds' times, each as slow as its slowest rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BandwidthShares:
    """The shares, what they cost for a message of one byte, and the reason for them."""

    shares: Shares
    seconds_per_byte: float
    reason: str


def shares_by_bandwidth(rates_bytes_per_s: Sequence[float], segments: int = 1) -> BandwidthShares:
    """Return the best shares for ranks with these NICs when GDRAA runs in `segments`."""
    ranks = len(rates_bytes_per_s)
    if ranks < 2 or not all(0 < rate < np.inf for rate in rates_bytes_per_s) or segments < 1:
        raise UserError("shares by bandwidth need two or more finite rates above zero and one segment or more")
    # Ranks of one rate are interchangeable, and the mean of best answers is a best answer: one unknown for each rate.
    kinds, kind_of, counts = np.unique(rates_bytes_per_s, return_inverse=True, return_counts=True)
    fractions, seconds = _solve(kinds, counts, ranks, segments)
    shares = Shares.of(fractions[kind_of])
    return BandwidthShares(shares, seconds, _reason(fractions, ranks, segments))


def _solve(kinds: Floats, counts: Ints, ranks: int, segments: int) -> tuple[Floats, float]:
    """Solve for a fraction for each kind of NIC, and the times of a first, a middle and a last round."""
    n = len(kinds)
    unit = kinds.max()
    inverse = unit / kinds
    rows, bounds = [], []

    def at_least(round_: int, slope: float, constant: float) -> None:
        """Constrain, for each kind: time of `round_` >= (constant + slope * fraction) / rate."""
        for kind in range(n):
            row = np.zeros(n + 3)
            row[kind], row[n + round_] = slope * inverse[kind], -1.0
            rows.append(row)
            bounds.append(-constant * inverse[kind])

    at_least(0, -1.0, 1.0)
    at_least(0, ranks - 1.0, 0.0)
    at_least(1, ranks - 2.0, 1.0)
    at_least(2, ranks - 1.0, 0.0)
    at_least(2, -1.0, 1.0)
    cost = np.concatenate([np.zeros(n), np.array([1.0, segments - 1.0, 1.0]) / segments])
    total = np.concatenate([counts, np.zeros(3)])[None, :]
    solution = linprog(cost, A_ub=np.array(rows), b_ub=np.array(bounds), A_eq=total, b_eq=[1.0], bounds=(0, None))
    assert solution.x is not None, solution.message
    return np.clip(solution.x[:n], 0.0, 1.0), float(cost @ solution.x / unit)


def _reason(fractions: Floats, ranks: int, segments: int) -> str:
    if np.allclose(fractions, 1 / ranks):
        return f"equal shares: with {segments} segment(s) they are best for the slowest NIC"
    return (
        f"the slowest NIC owns {fractions[0]:.1%} instead of {1 / ranks:.1%}: with {segments} segments its sending and "
        f"receiving overlap, and what it owns it would have to carry {ranks - 1} times"
    )
