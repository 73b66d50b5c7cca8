"""The least time for n samples where micro-batches may be very large: from both sides, by counting in steps."""

import numpy as np

from mimatrix.planner.search.cost_tables import Floats, Integers

# Lines of a table, and up to how many units every size is told apart: the finest that is worth its work.
_FINE = ((8192, 256), (4096, 192), (2048, 128), (1024, 96), (512, 64))
_WORK = 100_000_000
# From so many rows on, all are filled in line by line.
_MANY = 32


class Rough:
    """For rows of micro-batch times, how many samples can be done in a time: surely, and at the most.

    Samples are counted in units, and sizes in steps that grow with the size. The last size of each step can be had;
    the first one's time for as many samples as the last has is a bound, as times never fall. So where time grows with
    samples, a way of K micro-batches of n samples is off by K units of n, and by the part by which steps grow (1/256
    at the finest). Micro-batches of the best rate and one for the rest are off by one of K. The nearer one counts, and
    what is left between both sides is not guessed: it goes into `Found.bound_s`.
    """

    def __init__(self, seconds: Floats, most: Integers, rates: Floats, best: Integers) -> None:
        """`most` is how many samples of each row are asked for at most; `best` has the least seconds for a sample."""
        self.seconds, self.most, self.rates, self.best = seconds, most, rates, best
        rows, width = seconds.shape
        for lines, fine in _FINE:
            self.unit = -(-int(most.max()) // lines)
            self.ends = _ends(-(-(width - 1) // self.unit), fine, best // self.unit)
            if 2 * rows * min(lines, int(most.max())) * len(self.ends) <= _WORK:
                break
        firsts = np.append(0, self.ends[:-1]) * self.unit + 1
        lasts = self.ends * self.unit
        self._costs = np.where(lasts < width, seconds[:, np.minimum(lasts, width - 1)], np.inf)
        units = [self._units(each) for each in most.tolist()]
        self._sure = _tables(self._costs, self.ends, units)
        self._least = _tables(seconds[:, firsts], self.ends, units)

    def within(self, limits: Floats) -> Integers:
        """The samples of each row that can be done within its limit of time."""
        return np.minimum(np.maximum(self._counted(self._sure, limits), self._repeated(limits)), self.most)

    def at_most(self, limits: Floats) -> Integers:
        """No more samples can be."""
        by_rate = np.floor(np.maximum(limits, 0.0) / self.rates * (1 + 1e-12))
        return np.minimum(self._counted(self._least, limits), np.minimum(by_rate, self.most).astype(np.int64))

    def cut(self, rows: Integers, samples: Integers) -> list[tuple[int, ...]]:
        """The micro-batches for so many samples of each of `rows`, the larger ones first."""
        return [self._cut(int(row), int(count)) for row, count in zip(rows, samples, strict=True)]

    def _units(self, samples: int) -> int:
        return -(-samples // self.unit)

    def _counted(self, tables: list[Floats], limits: Floats) -> Integers:
        units = [np.searchsorted(table, limit, side="right") - 1 for table, limit in zip(tables, limits, strict=True)]
        return np.maximum(np.array(units, np.int64), 0) * self.unit

    def _repeated(self, limits: Floats) -> Integers:
        """With micro-batches of the best rate, and one for what time is left."""
        able = np.isfinite(self.rates) & (limits > 0)
        times = np.where(able, self.seconds[np.arange(len(limits)), self.best], 1.0)
        turns = np.floor(np.where(able, limits, 0.0) / times)
        left = np.where(able, limits, 0.0) - turns * times
        rest = [np.searchsorted(row, time, side="right") - 1 for row, time in zip(self.seconds, left, strict=True)]
        found = np.minimum(turns, self.most) * self.best + np.maximum(rest, 0)
        return np.where(able, found, 0).astype(np.int64)

    def _cut(self, row: int, samples: int) -> tuple[int, ...]:
        if not samples:
            return ()
        ways = [self._traced(row, samples), [int(self.best[row])] * -(-samples // int(self.best[row]))]
        cuts = [_fitted(self.seconds[row], sizes, samples) for sizes in ways if sum(sizes) >= samples]
        return min(cuts, key=lambda sizes: float(self.seconds[row, list(sizes)].sum()))

    def _traced(self, row: int, samples: int) -> list[int]:
        """The sizes that the table was made of; none where it has none."""
        left, sizes = self._units(samples), list[int]()
        if not np.isfinite(self._sure[row][left]):
            return []
        while left > 0:
            end = int(self.ends[np.argmin(self._sure[row][np.maximum(left - self.ends, 0)] + self._costs[row])])
            sizes.append(end * self.unit)
            left -= end
        return sizes


def _ends(count: int, fine: int, wanted: Integers) -> Integers:
    """The last size of each step, in units up to `count`: single ones up to `fine`, then growing by its part."""
    ends = list(range(1, min(fine, count) + 1))
    while ends[-1] < count:
        ends.append(min(count, ends[-1] + max(1, ends[-1] // fine)))
    return np.unique([*ends, *wanted[(wanted > 0) & (wanted <= count)].tolist()])


def _tables(costs: Floats, ends: Integers, units: list[int]) -> list[Floats]:
    """For each row the least cost of so many units or more, from 0."""
    if len(costs) < _MANY:
        return [_table(row, ends, count) for row, count in zip(costs, units, strict=True)]
    reach = int(ends[-1])
    times = np.zeros((reach + max(units) + 1, len(costs)))
    back, columns = reach - ends, np.ascontiguousarray(costs.T)
    for line in range(1, max(units) + 1):
        np.min(times[back + line] + columns, axis=0, out=times[reach + line])
    return [times[reach : reach + count + 1, row].copy() for row, count in enumerate(units)]


def _table(costs: Floats, ends: Integers, units: int) -> Floats:
    """The same for one row."""
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


def _fitted(seconds: Floats, sizes: list[int], samples: int) -> tuple[int, ...]:
    """So many samples of `sizes`, which have more: without the smallest, and less of the one that gains most by it."""
    sizes = sorted(sizes, reverse=True)
    over = sum(sizes) - samples
    while sizes[-1] <= over:
        over -= sizes.pop()
    if over:
        found = np.array(sizes)
        found[np.argmax(seconds[found] - seconds[found - over])] -= over
        sizes = sorted(found.tolist(), reverse=True)
    return tuple(sizes)
