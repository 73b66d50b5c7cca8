"""Micro-batches of ranks that do not wait for one another: stages 0 and 1."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mimatrix.planner.search.coarse_dp import Rough
from mimatrix.planner.search.cost_tables import Floats, Integers, Tables

Micro = tuple[tuple[int, ...], ...]

# How many sums the exact search may form for one table.
_WORK = 120_000_000
# And how long a table may be: each line takes its moment, however short it is.
LINES = 10_000
_HALVINGS = 60
# Tables are so many times as long as their largest micro-batch, at the least; beyond so many sizes rows are wide.
_REACH = 4
_WIDE = 256
_AROUND = 1e-2


@dataclass(frozen=True)
class Found:
    """A way to compute a global batch."""

    micro: Micro
    """The micro-batches of each rank."""
    seconds: float
    bound_s: float
    """No way with these largest micro-batches takes less."""


class Shortest:
    """For rows of micro-batch times, the least time for n samples in micro-batches of any sizes.

    Exactly, by adding one micro-batch to what is known for fewer samples; beyond the table's end, micro-batches of
    the best rate are added, so what it says there may be more than the least time, but a time that can be had.
    """

    def __init__(self, seconds: Floats, most: Integers) -> None:
        """`most` is how many samples of each row are asked for at most."""
        self.seconds = seconds
        self.most = most
        self.rates, self.best = best_rates(seconds)
        self.lengths = np.minimum(most, _longest(most, seconds.shape[1]))
        self.times = self._table()
        """By samples and row."""

    def _table(self) -> Floats:
        rows, width = self.seconds.shape
        return self._by_row() if width > max(_WIDE, 32 * rows) else self._by_line()

    def _by_row(self) -> Floats:
        """Row after row: what is added and compared lies side by side."""
        found = np.full((len(self.seconds), int(self.lengths.max()) + 1), np.inf)
        found[:, 0] = 0.0
        width = self.seconds.shape[1]
        sums = np.empty(width)
        for times, row, length in zip(found, self.seconds, self.lengths.tolist(), strict=True):
            backwards = np.ascontiguousarray(row[:0:-1])
            for line in range(1, length + 1):
                count = min(line, width - 1)
                np.add(times[line - count : line], backwards[width - 1 - count :], out=sums[:count])
                times[line] = sums[:count].min()
        return found.T

    def _by_line(self) -> Floats:
        rows, width = self.seconds.shape
        longest = int(self.lengths.max())
        # Before the first line stand as many infinite ones as the largest micro-batch reaches back. Rows with the
        # longest way to go come first, so that those still under way are a range.
        order = np.argsort(-self.lengths, kind="stable")
        under_way = np.searchsorted(-self.lengths[order], -np.arange(1, longest + 1), side="right")
        times = np.full((width - 1 + longest + 1, rows), np.inf)
        times[width - 1] = 0.0
        backwards = np.ascontiguousarray(self.seconds[order, :0:-1].T)
        for line, count in enumerate(under_way.tolist(), start=width):
            np.min(times[line - width + 1 : line, :count] + backwards[:, :count], axis=0, out=times[line, :count])
        found = np.empty((longest + 1, rows))
        found[:, order] = times[width - 1 :]
        return found

    def within(self, limits: Floats) -> Integers:
        """The most samples of each row within its limit of time."""
        rows = np.arange(len(limits))
        counts, high = np.zeros(len(limits), np.int64), self.lengths
        for _ in range(int(self.lengths.max()).bit_length()):
            middle = (counts + high + 1) // 2
            enough = self.times[middle, rows] <= limits
            counts, high = np.where(enough, middle, counts), np.where(enough, high, middle - 1)
        ended = (counts == self.lengths) & np.isfinite(self.rates) & (self.lengths < self.most)
        for row in np.nonzero(ended)[0]:
            best, length = int(self.best[row]), int(self.lengths[row])
            tail = self.times[length + 1 - best : length + 1, row]
            more = np.floor((limits[row] - tail) / self.seconds[row, best])
            counts[row] = int(np.max(np.arange(length + 1 - best, length + 1) + more * best))
        return counts

    def cut(self, rows: Integers, samples: Integers) -> list[tuple[int, ...]]:
        """The micro-batches for so many samples of each of `rows`, the larger ones first."""
        best = self.best[rows]
        beyond = np.maximum(0, -(-(samples - self.lengths[rows]) // best))
        beyond += self._of_best(rows, samples - beyond * best)
        left = samples - beyond * best
        sizes = [[int(size)] * int(times) for size, times in zip(best, beyond, strict=True)]
        reach = np.arange(1, self.seconds.shape[1])
        open_to = np.nonzero(left)[0]
        while len(open_to):
            before = left[open_to, None] - reach
            times = np.where(before < 0, np.inf, self.times[np.maximum(before, 0), rows[open_to, None]])
            chosen = np.argmin(times + self.seconds[rows[open_to], 1:], axis=1) + 1
            for place, size in zip(open_to.tolist(), chosen.tolist(), strict=True):
                sizes[place].append(size)
            left[open_to] -= chosen
            open_to = open_to[left[open_to] > 0]
        return [tuple(sorted(each, reverse=True)) for each in sizes]

    def _of_best(self, rows: Integers, samples: Integers) -> Integers:
        """How many micro-batches of the best rate can be taken away at once: those of all but the last few samples."""
        best = self.best[rows]
        turns = np.maximum(0, (samples - 2 * self.seconds.shape[1]) // best)
        with np.errstate(invalid="ignore"):  # rows that can do nothing
            taken = self.times[samples - turns * best, rows] + turns * self.seconds[rows, best]
            same = np.abs(taken - self.times[samples, rows]) <= 1e-12 * taken
        return np.where(same, turns, 0)

    def at_most(self, limits: Floats) -> Integers:
        """No more samples of each row can be done within its limit of time."""
        counts = self.within(limits)
        by_rate = np.floor(np.maximum(limits, 0.0) / self.rates * (1 + 1e-12))
        return np.where(counts <= self.lengths, counts, np.minimum(by_rate, self.most)).astype(np.int64)

    def exact(self, rows: Integers, samples: Integers) -> bool:
        """Whether what is said of so many samples is the least time."""
        return bool((samples <= self.lengths[rows]).all())


def shortest_of(seconds: Floats, most: Integers) -> Shortest | Rough:
    """The least times, exactly where that is not too much work, else from both sides."""
    width = seconds.shape[1]
    lines = np.minimum(most, _REACH * width).astype(np.float64)
    if float(lines @ np.minimum(lines, width)) <= _WORK or width <= _WIDE:
        return Shortest(seconds, most)
    return Rough(seconds, most, *best_rates(seconds))


def _longest(most: Integers, width: int) -> int:
    """How long a table may be that is worth its work, and never so short that the best micro-batch reaches beyond."""
    low, high = _REACH * width, max(_REACH * width, min(LINES, int(most.max())))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if int(np.minimum(most, middle).sum()) * width <= _WORK else (low, middle - 1)
    return low


def trimmed(full: Integers, samples: int) -> Integers:
    """`samples` in the proportion of `full`, which has no fewer; equal ones stay equal within one."""
    total = int(full.sum())
    parts, left = np.divmod(full.astype(np.int64) * samples, total)
    # Stable: of equal remainders the first rank's comes first.
    parts[np.argsort(-left, kind="stable")[: samples - int(parts.sum())]] += 1
    return parts


class Alone:
    """Ranks that meet only at the end of a step: each cuts its samples as suits it."""

    def __init__(self, tables: Tables, samples: int, ahead_s: Floats) -> None:
        """`ahead_s` is what each kind has to do beside its micro-batches before it is done."""
        self.tables = tables
        self.samples = samples
        self.ahead_s = ahead_s

    def best(self, caps: Integers) -> Found:
        """The shortest way with micro-batches of at most `caps`; one of them must be 1 or more."""
        rows, row_of = np.unique(np.stack([self.tables.kind_of, caps], axis=1), axis=0, return_inverse=True)
        row_of = row_of.reshape(-1)
        counts = np.bincount(row_of)
        seconds = _limited(self.tables.seconds[rows[:, 0]], rows[:, 1])
        ahead = self.ahead_s[rows[:, 0]]
        low, high = _bracket(seconds, ahead, counts, self.samples)
        # Nobody has a micro-batch that takes longer than all may.
        seconds = seconds[:, : 1 + max(1, int((seconds <= high - ahead[:, None]).sum(axis=1).max()) - 1)]
        rates, _ = best_rates(_limited(seconds, (seconds <= high - ahead[:, None]).sum(axis=1) - 1))
        most = np.clip(np.ceil((high - ahead) / rates), 1, self.samples).astype(np.int64)
        shortest = shortest_of(seconds, most)
        limit = least(lambda t: int(counts @ shortest.within(t - ahead)) >= self.samples, low, high)
        full = shortest.within(limit - ahead)[row_of]
        wanted = np.stack([row_of, trimmed(full, self.samples)], axis=1)
        pairs, pair_of = np.unique(wanted, axis=0, return_inverse=True)
        cuts = shortest.cut(pairs[:, 0], pairs[:, 1])
        taken = max(
            float(ahead[row] + seconds[row, list(sizes)].sum()) for row, sizes in zip(pairs[:, 0], cuts, strict=True)
        )
        # Where the tables were long enough and not too wide it is the optimum.
        bound = taken
        if isinstance(shortest, Rough) or not shortest.exact(row_of, full):
            enough = least(
                lambda t: int(counts @ shortest.at_most(t - ahead)) >= self.samples, low, max(low, limit), lower=True
            )
            bound = min(taken, max(low, enough))
        return Found(tuple(cuts[pair] for pair in pair_of.reshape(-1)), taken, bound)


class Reach:
    """For each kind (row) and largest micro-batch (column): how many samples it can do in a time."""

    def __init__(self, tables: Tables, most: int) -> None:
        self.tables = tables
        self.most = most
        self.kinds, self.width = tables.seconds.shape

    @cached_property
    def exact(self) -> bool:
        """Whether both bounds are the same."""
        return self.most <= LINES and bool(self.kinds * self.width * self.width * self.most <= _WORK // 4)

    @cached_property
    def _shortest(self) -> Shortest:
        seconds = np.repeat(self.tables.seconds, self.width, axis=0)
        caps = np.tile(np.arange(self.width), self.kinds)
        return Shortest(_limited(seconds, caps), np.full(len(caps), self.most))

    @cached_property
    def _rates(self) -> Floats:
        sizes = np.arange(1, self.width)
        rates = np.full((self.kinds, self.width), np.inf)
        rates[:, 1:] = np.minimum.accumulate(self.tables.seconds[:, 1:] / sizes, axis=1)
        return rates

    def times(self) -> Floats:
        """The least time by kind, largest micro-batch and samples. Only where `exact`."""
        return self._shortest.times.T.reshape(self.kinds, self.width, -1)

    def surely(self, limit: float) -> Floats:
        """What it can do at least."""
        if self.exact:
            counts = self._shortest.within(np.full(self.kinds * self.width, limit))
            return counts.reshape(self.kinds, self.width).astype(np.float64)
        return np.minimum(self._repeated(limit), self.most)

    def at_most(self, limit: float) -> Floats:
        """What it cannot do more than."""
        if self.exact:
            return self.surely(limit)
        return np.minimum(np.floor(limit / self._rates * (1 + 1e-12)), self.most)

    def _repeated(self, limit: float) -> Floats:
        """As many micro-batches of one size as there is time for, and one more for what is left."""
        times = self.tables.seconds[:, 1:]
        able = np.isfinite(times)
        turns = np.floor(limit / times)
        left = limit - turns * np.where(able, times, 0.0)
        # All rows in one search: each is moved beyond the one before it.
        rows = np.arange(self.kinds)[:, None]
        apart = 2 * limit + 1.0
        ladder = (np.minimum(times, 1.5 * limit + 0.5) + apart * rows).reshape(-1)
        rest = np.searchsorted(ladder, (left + apart * rows).reshape(-1), side="right").reshape(times.shape)
        rest -= rows * (self.width - 1)
        found = np.zeros((self.kinds, self.width))
        found[:, 1:] = np.maximum.accumulate(np.where(able, turns * np.arange(1, self.width) + rest, 0.0), axis=1)
        return found


def _limited(seconds: Floats, caps: Integers) -> Floats:
    """Rows of times, infinite beyond the cap of each."""
    return np.where(np.arange(seconds.shape[1]) <= caps[:, None], seconds, np.inf)


def best_rates(seconds: Floats) -> tuple[Floats, Integers]:
    """The least seconds for a sample, and the micro-batch that has it."""
    with np.errstate(invalid="ignore"):
        rates = seconds[:, 1:] / np.arange(1, seconds.shape[1])
    if not rates.shape[1]:
        return np.full(len(seconds), np.inf), np.ones(len(seconds), np.int64)
    best = np.argmin(rates, axis=1)
    return np.maximum(rates[np.arange(len(rates)), best], 1e-15), best + 1


def _bracket(seconds: Floats, ahead: Floats, counts: Integers, samples: int) -> tuple[float, float]:
    """Times between which the shortest lies: at the best rates, and with whole micro-batches of the best rate."""
    rates, best = best_rates(seconds)
    able = np.isfinite(rates)
    rates, best, weights, start = rates[able], best[able], counts[able], ahead[able]
    top = float(start.max() + samples * rates.min() + (rates * best).max() * 2)

    def by_rate(limit: float) -> bool:
        return float(weights @ np.maximum(np.floor((limit - start) / rates * (1 + 1e-12)), 0)) >= samples

    def by_whole(limit: float) -> bool:
        return float(weights @ (np.maximum(np.floor((limit - start) / (rates * best)), 0) * best)) >= samples

    def with_rest(limit: float) -> bool:
        turns = np.maximum(np.floor((limit - start) / (rates * best)), 0)
        left = np.maximum(limit - start, 0) - turns * rates * best
        rest = [np.searchsorted(row, time, side="right") - 1 for row, time in zip(seconds[able], left, strict=True)]
        return float(weights @ (turns * best + rest)) >= samples

    floor = float(ahead.max())
    low = least(by_rate, floor, top, lower=True)
    high = least(by_whole, low, top)
    return low, least(with_rest, low, high, _AROUND) if seconds.shape[1] > _WIDE else high


def least(enough: Callable[[float], bool], low: float, high: float, close: float = 1e-13, lower: bool = False) -> float:
    """The least time that is enough, from above (or from below); infinite where none is. `high` is a first guess."""
    if enough(low):
        return low
    for _ in range(_HALVINGS):
        if enough(high):
            break
        high *= 2
    else:
        return np.inf
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if enough(middle):
            high = middle
        else:
            low = middle
        if high - low <= close * high:
            break
    return low if lower else high
