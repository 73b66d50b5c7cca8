"""Rounds of micro-batches in which all ranks meet: stages 2 and 3, and every stage if samples are coupled."""

from dataclasses import dataclass

import numpy as np

from mimatrix.planner.search.cost_tables import CostTables, Floats, Integers
from mimatrix.planner.search.independent import Assignment, ExactDp, Micro, trim_in_proportion
from mimatrix.planner.search.limits import (
    DP_LINES,
    REPEATED_ROUNDS_GAP,
    REPEATED_ROUNDS_GAP_LARGE,
    ROUND_RESIDUES,
    ROUND_SUMS,
)


@dataclass(frozen=True)
class Rounds:
    """The rounds of a step, as samples of all ranks together."""

    sizes: tuple[int, ...]
    """The larger ones first."""
    bound_s: float
    """No rounds take less."""


class Lockstep:
    """Ranks that meet in every micro-step: a round takes as long as its slowest rank, and `round_s` on top.

    With `one_round` there is a single one if memory allows it.
    """

    def __init__(self, tables: CostTables, samples: int, round_s: float, *, one_round: bool = False) -> None:
        self.tables = tables
        self.samples = samples
        self.round_s = round_s
        self.one_round = one_round

    def best(self, max_micro_batch: Integers) -> Assignment:
        """Return the shortest assignment with these largest micro-batches; one of them must be 1 or more."""
        seconds = self.tables.seconds[self.tables.kind_of]
        is_open = (np.arange(seconds.shape[1]) <= max_micro_batch[:, None])[:, 1:]
        # A rank that takes T(b) for b samples adds its b-th sample to a round when the round is T(b) long. So the
        # time of a round of m samples is the m-th of all these times in order.
        levels = np.sort(seconds[:, 1:][is_open])
        if self.one_round and len(levels) >= self.samples:
            rounds = Rounds((self.samples,), float(levels[self.samples - 1]) + self.round_s)
        else:
            rounds = shortest_rounds(levels + self.round_s, self.samples)
        micro = self._fill(rounds.sizes, levels, np.where(is_open, seconds[:, 1:], np.inf))
        taken = self._duration_s(micro, seconds)
        return Assignment(micro, taken, min(taken, rounds.bound_s))

    def _duration_s(self, micro: Micro, seconds: Floats) -> float:
        turns = np.zeros((len(micro), max(map(len, micro))), np.int64)
        for rank, sizes in enumerate(micro):
            turns[rank, : len(sizes)] = sizes
        # A rank without samples takes no time.
        times = np.where(turns > 0, seconds[np.arange(len(micro))[:, None], turns], 0.0)
        return float((times.max(axis=0) + self.round_s).sum())

    def _fill(self, sizes: tuple[int, ...], levels: Floats, seconds: Floats) -> Micro:
        """Return the micro-batches of each rank. All rounds but the last are as full as their time allows.

        So a rank's micro-batches never grow from round to round, and a rank that has none in a round has none after it.
        """
        rounds: list[Integers] = []
        left = self.samples
        most = {size: (seconds <= levels[size - 1]).sum(axis=1) for size in set(sizes)}
        for size in sizes:
            if left <= 0:
                break
            full = most[size]
            rounds.append(full if full.sum() <= left else trim_in_proportion(full, left))
            left -= int(rounds[-1].sum())
        return tuple(tuple(size for size in column if size) for column in np.stack(rounds, axis=1).tolist())


def shortest_rounds(times: Floats, samples: int) -> Rounds:
    """Return the rounds that sum to `samples` or more in the least time; `times[m - 1]` is that of m samples."""
    times = times[:samples]
    lowest = samples * float(np.min(times / np.arange(1, len(times) + 1)))
    repeated, taken = _repeat_one_size(times, samples)
    if taken <= lowest * (
        1 + (REPEATED_ROUNDS_GAP if samples * len(times) <= ROUND_SUMS else REPEATED_ROUNDS_GAP_LARGE)
    ):
        return Rounds(repeated, min(taken, lowest))
    fine = -(-len(times) // ROUND_RESIDUES)
    coarse = int(np.ceil(max(1.0, np.sqrt(samples * len(times) / ROUND_SUMS), samples / DP_LINES)))
    rounds = _by_unit(times, samples, fine) or _by_unit(times, samples, max(fine, coarse))
    if rounds is None:
        return Rounds(repeated, lowest)
    cut_s = float(sum(times[size - 1] for size in rounds.sizes)) if rounds.sizes else np.inf
    return Rounds(rounds.sizes if cut_s < taken else repeated, min(max(lowest, rounds.bound_s), cut_s, taken))


def _by_unit(times: Floats, samples: int, unit: int) -> Rounds | None:
    """Return rounds counted by the unit; None if that would take too long.

    Rounds of whole units are feasible. Rounds of begun units, each for the time of its first sample, are a bound. With
    a unit of one they are the same.
    """
    needed = -(-samples // unit)
    begun = _exactly(times[::unit], needed)
    if begun is None:
        return None
    bound_s = float(sum(times[(size - 1) * unit] for size in begun))
    whole = begun if unit == 1 else _exactly(times[unit - 1 :: unit], needed)
    return Rounds(tuple(size * unit for size in whole or ()), bound_s)


def _exactly(times: Floats, samples: int) -> tuple[int, ...] | None:
    """Return the sizes that sum to `samples` in the least time; None if that would take too long."""
    if not len(times):
        return None
    sizes = _by_residue(times, samples)
    if sizes is None and samples <= DP_LINES and samples * len(times) <= 2 * ROUND_SUMS:
        row = np.concatenate(([0.0], times))[None]
        sizes = ExactDp(row, np.array([samples])).cut(np.zeros(1, np.int64), np.array([samples]))[0]
    return sizes


def _by_residue(times: Floats, samples: int) -> tuple[int, ...] | None:
    """Return rounds of the best rate, and some others whose sum leaves the right remainder.

    Every other round costs more than its samples would at the best rate. Which of them are worth it depends on the
    remainder alone, so this is a shortest path among remainders. None if the others sum to more than `samples`.
    """
    sizes = np.arange(1, len(times) + 1)
    best = int(np.argmin(times / sizes)) + 1
    rate = times[best - 1] / best
    # Of paths that cost the same, the one with fewer samples.
    extra = np.maximum(times - rate * sizes, 0.0) + 1e-13 * rate * sizes
    edges, chosen = _cheapest(extra, best)
    around = np.concatenate((edges, edges))
    costs, through = np.full(best, np.inf), np.zeros(best, np.int64)
    costs[0], goal, here = 0.0, samples % best, 0
    is_open = np.ones(best, bool)
    while here != goal:
        is_open[here] = False
        onward = costs[here] + around[best - here : 2 * best - here]
        better = is_open & (onward < costs)
        costs[better], through[better] = onward[better], here
        here = int(np.argmin(np.where(is_open, costs, np.inf)))
        if not is_open[here] or not np.isfinite(costs[here]):
            return None
    others = []
    while here:
        others.append(int(chosen[(here - through[here]) % best]))
        here = int(through[here])
    left = samples - sum(others)
    return None if left < 0 else tuple(sorted([best] * (left // best) + others, reverse=True))


def _cheapest(extra: Floats, count: int) -> tuple[Floats, Integers]:
    """Return for each remainder by `count` the least of `extra` among the sizes that leave it, and that size."""
    lines = -(-(len(extra) + 1) // count)
    padded = np.full(lines * count, np.inf)
    padded[1 : len(extra) + 1] = extra
    table = padded.reshape(lines, count)
    line = np.argmin(table, axis=0)
    places = np.arange(count)
    return table[line, places], line * count + places


def _repeat_one_size(times: Floats, samples: int) -> tuple[tuple[int, ...], float]:
    """Return the best rounds of one size, with one round for the rest, and their time."""
    sizes = np.arange(1, len(times) + 1)
    turns, rest = np.divmod(samples, sizes)
    taken = turns * times + np.where(rest > 0, times[rest - 1], 0.0)
    best = int(np.argmin(taken))
    last = (int(rest[best]),) if rest[best] else ()
    return (int(sizes[best]),) * int(turns[best]) + last, float(taken[best])
