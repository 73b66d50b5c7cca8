"""Micro-batches of ranks that do not wait for each other (stages 0 and 1): a dynamic programme for each kind."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mimatrix.planner.search.coarse_dp import CoarseDp
from mimatrix.planner.search.cost_tables import CostTables, Floats, Integers
from mimatrix.planner.search.limits import BRACKET_GAP, DP_LINES, DP_REACH, EXACT_DP_SUMS, TIME_HALVINGS, WIDE_ROW

Micro = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Assignment:
    """The micro-batches of all ranks that make up a global batch."""

    micro: Micro
    """The micro-batches of each rank."""
    seconds: float
    bound_s: float
    """No assignment with these largest micro-batches takes less."""


class ExactDp:
    """The least time for n samples in micro-batches of any sizes, for rows of micro-batch times.

    It is exact within the table, which adds one micro-batch to the best for fewer samples. Beyond the end of the
    table, micro-batches of the best rate are added, so that times there are feasible and may be more than the least.
    """

    def __init__(self, seconds: Floats, most: Integers) -> None:
        """Fill the table. `most` bounds the samples of each row."""
        self.seconds = seconds
        self.most = most
        self.rates, self.best = best_rates(seconds)
        self.lengths = np.minimum(most, _longest(most, seconds.shape[1]))
        self.times = self._table()
        """By samples and row."""

    def _table(self) -> Floats:
        rows, width = self.seconds.shape
        return self._by_row() if width > max(WIDE_ROW, 32 * rows) else self._by_line()

    def _by_row(self) -> Floats:
        """Fill the table row by row: what is added and compared lies next to each other in memory."""
        table = np.full((len(self.seconds), int(self.lengths.max()) + 1), np.inf)
        table[:, 0] = 0.0
        width = self.seconds.shape[1]
        sums = np.empty(width)
        for times, row, length in zip(table, self.seconds, self.lengths.tolist(), strict=True):
            backwards = np.ascontiguousarray(row[:0:-1])
            for line in range(1, length + 1):
                count = min(line, width - 1)
                np.add(times[line - count : line], backwards[width - 1 - count :], out=sums[:count])
                times[line] = sums[:count].min()
        return table.T

    def _by_line(self) -> Floats:
        rows, width = self.seconds.shape
        longest = int(self.lengths.max())
        # Before the first line stand as many infinite ones as the largest micro-batch reaches back. The longest rows
        # come first, so that those that are not finished are a range.
        order = np.argsort(-self.lengths, kind="stable")
        unfinished = np.searchsorted(-self.lengths[order], -np.arange(1, longest + 1), side="right")
        times = np.full((width - 1 + longest + 1, rows), np.inf)
        times[width - 1] = 0.0
        backwards = np.ascontiguousarray(self.seconds[order, :0:-1].T)
        for line, count in enumerate(unfinished.tolist(), start=width):
            np.min(times[line - width + 1 : line, :count] + backwards[:, :count], axis=0, out=times[line, :count])
        table = np.empty((longest + 1, rows))
        table[:, order] = times[width - 1 :]
        return table

    def samples_within(self, limits: Floats) -> Integers:
        """Return the most samples of each row within its limit of time."""
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
        """Return the micro-batches for `samples` of each of `rows`, the larger ones first."""
        best = self.best[rows]
        beyond = np.maximum(0, -(-(samples - self.lengths[rows]) // best))
        beyond += self._best_at_once(rows, samples - beyond * best)
        left = samples - beyond * best
        sizes = [[int(size)] * int(times) for size, times in zip(best, beyond, strict=True)]
        reach = np.arange(1, self.seconds.shape[1])
        unfinished = np.nonzero(left)[0]
        while len(unfinished):
            before = left[unfinished, None] - reach
            times = np.where(before < 0, np.inf, self.times[np.maximum(before, 0), rows[unfinished, None]])
            chosen = np.argmin(times + self.seconds[rows[unfinished], 1:], axis=1) + 1
            for place, size in zip(unfinished.tolist(), chosen.tolist(), strict=True):
                sizes[place].append(size)
            left[unfinished] -= chosen
            unfinished = unfinished[left[unfinished] > 0]
        return [tuple(sorted(of_row, reverse=True)) for of_row in sizes]

    def _best_at_once(self, rows: Integers, samples: Integers) -> Integers:
        """Return how many micro-batches of the best rate can be taken at once: all but those of the last samples."""
        best = self.best[rows]
        turns = np.maximum(0, (samples - 2 * self.seconds.shape[1]) // best)
        with np.errstate(invalid="ignore"):  # rows that can do nothing
            taken = self.times[samples - turns * best, rows] + turns * self.seconds[rows, best]
            same = np.abs(taken - self.times[samples, rows]) <= 1e-12 * taken
        return np.where(same, turns, 0)

    def max_samples_within(self, limits: Floats) -> Integers:
        """Return a bound on the samples of each row within its limit of time."""
        counts = self.samples_within(limits)
        by_rate = np.floor(np.maximum(limits, 0.0) / self.rates * (1 + 1e-12))
        return np.where(counts <= self.lengths, counts, np.minimum(by_rate, self.most)).astype(np.int64)

    def exact(self, rows: Integers, samples: Integers) -> bool:
        """Tell whether the times of these samples are exact."""
        return bool((samples <= self.lengths[rows]).all())


def least_times(seconds: Floats, most: Integers) -> ExactDp | CoarseDp:
    """Return the least times: exactly if that is not too expensive, otherwise from both sides."""
    width = seconds.shape[1]
    lines = np.minimum(most, DP_REACH * width).astype(np.float64)
    if float(lines @ np.minimum(lines, width)) <= EXACT_DP_SUMS or width <= WIDE_ROW:
        return ExactDp(seconds, most)
    return CoarseDp(seconds, most, *best_rates(seconds))


def _longest(most: Integers, width: int) -> int:
    """Return the longest table that may be filled, and never one so short that the best micro-batch reaches beyond."""
    low, high = DP_REACH * width, max(DP_REACH * width, min(DP_LINES, int(most.max())))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if int(np.minimum(most, middle).sum()) * width <= EXACT_DP_SUMS else (low, middle - 1)
        )
    return low


def trim_in_proportion(full: Integers, samples: int) -> Integers:
    """Return `samples` in the proportion of `full`, which has no fewer; equal entries stay equal within one."""
    total = int(full.sum())
    parts, left = np.divmod(full.astype(np.int64) * samples, total)
    # Stable: of equal remainders the first rank's comes first.
    parts[np.argsort(-left, kind="stable")[: samples - int(parts.sum())]] += 1
    return parts


class Independent:
    """Ranks that meet only at the end of a step: each cuts its samples by itself."""

    def __init__(self, tables: CostTables, samples: int, own_s: Floats) -> None:
        """Store the problem. `own_s` is what each kind computes in addition to its micro-batches."""
        self.tables = tables
        self.samples = samples
        self.own_s = own_s

    def best(self, max_micro_batch: Integers) -> Assignment:
        """Return the shortest assignment with these largest micro-batches; one of them must be 1 or more."""
        rows, row_of = np.unique(np.stack([self.tables.kind_of, max_micro_batch], axis=1), axis=0, return_inverse=True)
        row_of = row_of.reshape(-1)
        counts = np.bincount(row_of)
        seconds = _limited(self.tables.seconds[rows[:, 0]], rows[:, 1])
        own = self.own_s[rows[:, 0]]
        low, high = _bracket(seconds, own, counts, self.samples)
        # No rank has a micro-batch that takes longer than the whole step may.
        seconds = seconds[:, : 1 + max(1, int((seconds <= high - own[:, None]).sum(axis=1).max()) - 1)]
        rates, _ = best_rates(_limited(seconds, (seconds <= high - own[:, None]).sum(axis=1) - 1))
        most = np.clip(np.ceil((high - own) / rates), 1, self.samples).astype(np.int64)
        shortest = least_times(seconds, most)
        limit = least_time(lambda t: int(counts @ shortest.samples_within(t - own)) >= self.samples, low, high)
        full = shortest.samples_within(limit - own)[row_of]
        wanted = np.stack([row_of, trim_in_proportion(full, self.samples)], axis=1)
        pairs, pair_of = np.unique(wanted, axis=0, return_inverse=True)
        cuts = shortest.cut(pairs[:, 0], pairs[:, 1])
        taken = max(
            float(own[row] + seconds[row, list(sizes)].sum()) for row, sizes in zip(pairs[:, 0], cuts, strict=True)
        )
        # With tables that are long enough and not too wide it is the optimum.
        bound = taken
        if isinstance(shortest, CoarseDp) or not shortest.exact(row_of, full):
            enough = least_time(
                lambda t: int(counts @ shortest.max_samples_within(t - own)) >= self.samples,
                low,
                max(low, limit),
                lower=True,
            )
            bound = min(taken, max(low, enough))
        return Assignment(tuple(cuts[pair] for pair in pair_of.reshape(-1)), taken, bound)


class SampleCounts:
    """How many samples each kind of rank (row) with each largest micro-batch (column) can do in a time."""

    def __init__(self, tables: CostTables, most: int) -> None:
        self.tables = tables
        self.most = most
        self.kinds, self.width = tables.seconds.shape

    @cached_property
    def exact(self) -> bool:
        """Whether both bounds are the same."""
        return self.most <= DP_LINES and bool(self.kinds * self.width * self.width * self.most <= EXACT_DP_SUMS // 4)

    @cached_property
    def _shortest(self) -> ExactDp:
        seconds = np.repeat(self.tables.seconds, self.width, axis=0)
        max_micro_batch = np.tile(np.arange(self.width), self.kinds)
        return ExactDp(_limited(seconds, max_micro_batch), np.full(len(max_micro_batch), self.most))

    @cached_property
    def _rates(self) -> Floats:
        sizes = np.arange(1, self.width)
        rates = np.full((self.kinds, self.width), np.inf)
        rates[:, 1:] = np.minimum.accumulate(self.tables.seconds[:, 1:] / sizes, axis=1)
        return rates

    def times(self) -> Floats:
        """Return the least time by kind, largest micro-batch and samples. Only if `exact`."""
        return self._shortest.times.T.reshape(self.kinds, self.width, -1)

    def min_samples_within(self, limit: float) -> Floats:
        """Return what it can do at least."""
        if self.exact:
            counts = self._shortest.samples_within(np.full(self.kinds * self.width, limit))
            return counts.reshape(self.kinds, self.width).astype(np.float64)
        return np.minimum(self._by_repetition(limit), self.most)

    def max_samples_within(self, limit: float) -> Floats:
        """Return what it can do at most."""
        if self.exact:
            return self.min_samples_within(limit)
        return np.minimum(np.floor(limit / self._rates * (1 + 1e-12)), self.most)

    def _by_repetition(self, limit: float) -> Floats:
        """Count micro-batches of one size, as many as there is time for, and one for the time that is left."""
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
        counts = np.zeros((self.kinds, self.width))
        counts[:, 1:] = np.maximum.accumulate(np.where(able, turns * np.arange(1, self.width) + rest, 0.0), axis=1)
        return counts


def _limited(seconds: Floats, max_micro_batch: Integers) -> Floats:
    """Return rows of times, infinite beyond the cap of each."""
    return np.where(np.arange(seconds.shape[1]) <= max_micro_batch[:, None], seconds, np.inf)


def best_rates(seconds: Floats) -> tuple[Floats, Integers]:
    """Return the least seconds per sample of each row, and the micro-batch that has it."""
    with np.errstate(invalid="ignore"):
        rates = seconds[:, 1:] / np.arange(1, seconds.shape[1])
    if not rates.shape[1]:
        return np.full(len(seconds), np.inf), np.ones(len(seconds), np.int64)
    best = np.argmin(rates, axis=1)
    return np.maximum(rates[np.arange(len(rates)), best], 1e-15), best + 1


def _bracket(seconds: Floats, own: Floats, counts: Integers, samples: int) -> tuple[float, float]:
    """Return bounds of the shortest time: at the best rates, and with whole micro-batches of the best rate."""
    rates, best = best_rates(seconds)
    able = np.isfinite(rates)
    rates, best, weights, start = rates[able], best[able], counts[able], own[able]
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

    floor = float(own.max())
    low = least_time(by_rate, floor, top, lower=True)
    high = least_time(by_whole, low, top)
    return low, least_time(with_rest, low, high, BRACKET_GAP) if seconds.shape[1] > WIDE_ROW else high


def least_time(
    enough: Callable[[float], bool], low: float, high: float, close: float = 1e-13, lower: bool = False
) -> float:
    """Return the smallest time that is enough, from above (or below); infinite if none is. `high` is a first guess."""
    if enough(low):
        return low
    for _ in range(TIME_HALVINGS):
        if enough(high):
            break
        high *= 2
    else:
        return np.inf
    for _ in range(TIME_HALVINGS):
        middle = (low + high) / 2
        if enough(middle):
            high = middle
        else:
            low = middle
        if high - low <= close * high:
            break
    return low if lower else high
