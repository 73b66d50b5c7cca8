"""Coarse dynamic programme: bound the least time for n samples from both sides if micro-batches may be very large."""

import numpy as np

from mimatrix.planner.search.cost_tables import Floats, Integers
from mimatrix.planner.search.limits import COARSE_DP_SUMS, COARSE_RESOLUTIONS, COARSE_ROWS_BY_LINE


class CoarseDp:
    """How many samples rows of micro-batch times can do in a time: surely, and at the most.

    Samples are counted in units, and sizes in steps that grow with the size. The last size of each step is feasible;
    the time of the first one, for as many samples as the last has, is a bound, since times never fall. So if time grows
    with samples, K micro-batches of n samples are off by K units of n, and by the part by which steps grow (1/256 at
    the finest). Micro-batches of the best rate and one for the rest are off by one of K. The closer one counts, and the
    gap between both sides goes into `Assignment.bound_s`.
    """

    def __init__(self, seconds: Floats, most: Integers, rates: Floats, best: Integers) -> None:
        """Fill the tables. `most` bounds the samples of each row; `best` has the least seconds per sample."""
        self.seconds, self.most, self.rates, self.best = seconds, most, rates, best
        rows, width = seconds.shape
        for lines, fine in COARSE_RESOLUTIONS:
            self.unit = -(-int(most.max()) // lines)
            self.ends = _ends(-(-(width - 1) // self.unit), fine, best // self.unit)
            if 2 * rows * min(lines, int(most.max())) * len(self.ends) <= COARSE_DP_SUMS:
                break
        firsts = np.append(0, self.ends[:-1]) * self.unit + 1
        lasts = self.ends * self.unit
        self._costs = np.where(lasts < width, seconds[:, np.minimum(lasts, width - 1)], np.inf)
        units = [self._units(count) for count in most.tolist()]
        self._sure = _tables(self._costs, self.ends, units)
        self._least = _tables(seconds[:, firsts], self.ends, units)

    def samples_within(self, limits: Floats) -> Integers:
        """Return the samples of each row that are surely done in its time."""
        return np.minimum(np.maximum(self._by_table(self._sure, limits), self._by_repetition(limits)), self.most)

    def max_samples_within(self, limits: Floats) -> Integers:
        """Return a bound on the samples of each row that can be done in its time."""
        by_rate = np.floor(np.maximum(limits, 0.0) / self.rates * (1 + 1e-12))
        return np.minimum(self._by_table(self._least, limits), np.minimum(by_rate, self.most).astype(np.int64))

    def cut(self, rows: Integers, samples: Integers) -> list[tuple[int, ...]]:
        """Return the micro-batches for `samples` of each of `rows`, the larger ones first."""
        return [self._cut(int(row), int(count)) for row, count in zip(rows, samples, strict=True)]

    def _units(self, samples: int) -> int:
        return -(-samples // self.unit)

    def _by_table(self, tables: list[Floats], limits: Floats) -> Integers:
        units = [np.searchsorted(table, limit, side="right") - 1 for table, limit in zip(tables, limits, strict=True)]
        return np.maximum(np.array(units, np.int64), 0) * self.unit

    def _by_repetition(self, limits: Floats) -> Integers:
        """Count micro-batches of the best rate, and one for the time that is left."""
        able = np.isfinite(self.rates) & (limits > 0)
        times = np.where(able, self.seconds[np.arange(len(limits)), self.best], 1.0)
        turns = np.floor(np.where(able, limits, 0.0) / times)
        left = np.where(able, limits, 0.0) - turns * times
        rest = [np.searchsorted(row, time, side="right") - 1 for row, time in zip(self.seconds, left, strict=True)]
        counts = np.minimum(turns, self.most) * self.best + np.maximum(rest, 0)
        return np.where(able, counts, 0).astype(np.int64)

    def _cut(self, row: int, samples: int) -> tuple[int, ...]:
        if not samples:
            return ()
        ways = [self._trace_back(row, samples), [int(self.best[row])] * -(-samples // int(self.best[row]))]
        cuts = [_trim(self.seconds[row], sizes, samples) for sizes in ways if sum(sizes) >= samples]
        return min(cuts, key=lambda sizes: float(self.seconds[row, list(sizes)].sum()))

    def _trace_back(self, row: int, samples: int) -> list[int]:
        """Return the sizes that an entry of the table was made of; none if there are none."""
        left, sizes = self._units(samples), list[int]()
        if not np.isfinite(self._sure[row][left]):
            return []
        while left > 0:
            end = int(self.ends[np.argmin(self._sure[row][np.maximum(left - self.ends, 0)] + self._costs[row])])
            sizes.append(end * self.unit)
            left -= end
        return sizes


def _ends(count: int, fine: int, wanted: Integers) -> Integers:
    """Return the last size of each step, in units up to `count`: single ones up to `fine`, then growing by its part."""
    ends = list(range(1, min(fine, count) + 1))
    while ends[-1] < count:
        ends.append(min(count, ends[-1] + max(1, ends[-1] // fine)))
    return np.unique([*ends, *wanted[(wanted > 0) & (wanted <= count)].tolist()])


def _tables(costs: Floats, ends: Integers, units: list[int]) -> list[Floats]:
    """Return for each row the least cost of n units or more, from 0."""
    if len(costs) < COARSE_ROWS_BY_LINE:
        return [_table(row, ends, count) for row, count in zip(costs, units, strict=True)]
    reach = int(ends[-1])
    times = np.zeros((reach + max(units) + 1, len(costs)))
    back, columns = reach - ends, np.ascontiguousarray(costs.T)
    for line in range(1, max(units) + 1):
        np.min(times[back + line] + columns, axis=0, out=times[reach + line])
    return [times[reach : reach + count + 1, row].copy() for row, count in enumerate(units)]


def _table(costs: Floats, ends: Integers, units: int) -> Floats:
    """Return the table of one row."""
    able = np.isfinite(costs)
    if not able.any():
        return np.append(0.0, np.full(units, np.inf))
    costs, ends = costs[able], ends[able]
    reach = int(ends[-1])
    times = np.zeros(reach + units + 1)
    back = reach - ends
    for line in range(1, units + 1):
        times[reach + line] = (times[back + line] + costs).min()
    return times[reach:]


def _trim(seconds: Floats, sizes: list[int], samples: int) -> tuple[int, ...]:
    """Cut `sizes` down to `samples`: drop the smallest, and reduce the one that gains most by it."""
    sizes = sorted(sizes, reverse=True)
    over = sum(sizes) - samples
    while sizes[-1] <= over:
        over -= sizes.pop()
    if over:
        reduced = np.array(sizes)
        reduced[np.argmax(seconds[reduced] - seconds[reduced - over])] -= over
        sizes = sorted(reduced.tolist(), reverse=True)
    return tuple(sizes)
