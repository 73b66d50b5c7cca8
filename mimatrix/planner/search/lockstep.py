"""Rounds of micro-batches in which all ranks meet: stages 2 and 3, and any stage where samples belong together."""

from dataclasses import dataclass

import numpy as np

from mimatrix.planner.search.cost_tables import Floats, Integers, Tables
from mimatrix.planner.search.independent import LINES, Found, Micro, Shortest, trimmed

# How many sums the search over rounds may form; above it samples are counted by the unit, and the bound says so.
_WORK = 2_000_000
# Remainders among which a shortest way is looked for.
_RESIDUES = 1_000
# Where the simple way is so near to what is possible at all, nothing more is searched for.
_CLOSE, _NEAR = 1e-6, 2e-3


@dataclass(frozen=True)
class Sizes:
    """The rounds of a step, as samples of all ranks together."""

    sizes: tuple[int, ...]
    """The larger ones first."""
    bound_s: float
    """No rounds take less."""


class Together:
    """Ranks that meet in every micro-step: a round takes as long as its slowest rank, and `round_s` on top.

    With `one_round` there is a single one wherever memory allows.
    """

    def __init__(self, tables: Tables, samples: int, round_s: float, *, one_round: bool = False) -> None:
        self.tables = tables
        self.samples = samples
        self.round_s = round_s
        self.one_round = one_round

    def best(self, caps: Integers) -> Found:
        """The shortest way with micro-batches of at most `caps`; one of them must be 1 or more."""
        seconds = self.tables.seconds[self.tables.kind_of]
        open_to = (np.arange(seconds.shape[1]) <= caps[:, None])[:, 1:]
        # A rank that takes T(b) for b samples adds its b-th sample to a round when the round is T(b) long. So the
        # time of a round of m samples is the m-th of all these times in order.
        levels = np.sort(seconds[:, 1:][open_to])
        if self.one_round and len(levels) >= self.samples:
            found = Sizes((self.samples,), float(levels[self.samples - 1]) + self.round_s)
        else:
            found = fewest_seconds(levels + self.round_s, self.samples)
        micro = self._filled(found.sizes, levels, np.where(open_to, seconds[:, 1:], np.inf))
        taken = self._taken(micro, seconds)
        return Found(micro, taken, min(taken, found.bound_s))

    def _taken(self, micro: Micro, seconds: Floats) -> float:
        turns = np.zeros((len(micro), max(map(len, micro))), np.int64)
        for rank, sizes in enumerate(micro):
            turns[rank, : len(sizes)] = sizes
        # A rank without samples takes no time.
        times = np.where(turns > 0, seconds[np.arange(len(micro))[:, None], turns], 0.0)
        return float((times.max(axis=0) + self.round_s).sum())

    def _filled(self, sizes: tuple[int, ...], levels: Floats, seconds: Floats) -> Micro:
        """The micro-batches of each rank. All rounds but the last are as full as their time allows.

        So a rank's micro-batches never grow from round to round, and one that has none in a round has none after it.
        """
        rounds: list[Integers] = []
        left = self.samples
        most = {size: (seconds <= levels[size - 1]).sum(axis=1) for size in set(sizes)}
        for size in sizes:
            if left <= 0:
                break
            full = most[size]
            rounds.append(full if full.sum() <= left else trimmed(full, left))
            left -= int(rounds[-1].sum())
        return tuple(tuple(size for size in column if size) for column in np.stack(rounds, axis=1).tolist())


def fewest_seconds(times: Floats, samples: int) -> Sizes:
    """The sizes of rounds that sum to `samples` or more in the least time; `times[m - 1]` is that of m samples."""
    times = times[:samples]
    lowest = samples * float(np.min(times / np.arange(1, len(times) + 1)))
    repeated, taken = _repeated(times, samples)
    if taken <= lowest * (1 + (_CLOSE if samples * len(times) <= _WORK else _NEAR)):
        return Sizes(repeated, min(taken, lowest))
    fine = -(-len(times) // _RESIDUES)
    coarse = int(np.ceil(max(1.0, np.sqrt(samples * len(times) / _WORK), samples / LINES)))
    found = _by_unit(times, samples, fine) or _by_unit(times, samples, max(fine, coarse))
    if found is None:
        return Sizes(repeated, lowest)
    cut_s = float(sum(times[size - 1] for size in found.sizes)) if found.sizes else np.inf
    return Sizes(found.sizes if cut_s < taken else repeated, min(max(lowest, found.bound_s), cut_s, taken))


def _by_unit(times: Floats, samples: int, unit: int) -> Sizes | None:
    """With rounds counted by the unit: whole units can be had, and begun ones, each for the time of its first sample,
    are a bound. With a unit of one they are the same. None where that would take too long.
    """
    needed = -(-samples // unit)
    begun = _exactly(times[::unit], needed)
    if begun is None:
        return None
    bound_s = float(sum(times[(size - 1) * unit] for size in begun))
    whole = begun if unit == 1 else _exactly(times[unit - 1 :: unit], needed)
    return Sizes(tuple(size * unit for size in whole or ()), bound_s)


def _exactly(times: Floats, samples: int) -> tuple[int, ...] | None:
    """Sizes that sum to `samples` in the least time; None where that would take too long."""
    if not len(times):
        return None
    found = _by_residue(times, samples)
    if found is None and samples <= LINES and samples * len(times) <= 2 * _WORK:
        row = np.concatenate(([0.0], times))[None]
        found = Shortest(row, np.array([samples])).cut(np.zeros(1, np.int64), np.array([samples]))[0]
    return found


def _by_residue(times: Floats, samples: int) -> tuple[int, ...] | None:
    """The same, as rounds of the best rate and some others, whose sum leaves the right remainder.

    Every other round costs more than its samples would at the best rate. Which of them are worth it depends on the
    remainder alone, if they are no more than `samples` in all; else None. So it is a shortest way among remainders.
    """
    sizes = np.arange(1, len(times) + 1)
    best = int(np.argmin(times / sizes)) + 1
    rate = times[best - 1] / best
    # Of ways that cost the same the one of fewer samples.
    extra = np.maximum(times - rate * sizes, 0.0) + 1e-13 * rate * sizes
    edges, chosen = _cheapest(extra, best)
    around = np.concatenate((edges, edges))
    costs, through = np.full(best, np.inf), np.zeros(best, np.int64)
    costs[0], goal, here = 0.0, samples % best, 0
    open_to = np.ones(best, bool)
    while here != goal:
        open_to[here] = False
        onward = costs[here] + around[best - here : 2 * best - here]
        better = open_to & (onward < costs)
        costs[better], through[better] = onward[better], here
        here = int(np.argmin(np.where(open_to, costs, np.inf)))
        if not open_to[here] or not np.isfinite(costs[here]):
            return None
    others = []
    while here:
        others.append(int(chosen[(here - through[here]) % best]))
        here = int(through[here])
    left = samples - sum(others)
    return None if left < 0 else tuple(sorted([best] * (left // best) + others, reverse=True))


def _cheapest(extra: Floats, count: int) -> tuple[Floats, Integers]:
    """For each remainder by `count`, the least of `extra` among the sizes that leave it, and that size."""
    lines = -(-(len(extra) + 1) // count)
    padded = np.full(lines * count, np.inf)
    padded[1 : len(extra) + 1] = extra
    table = padded.reshape(lines, count)
    line = np.argmin(table, axis=0)
    places = np.arange(count)
    return table[line, places], line * count + places


def _repeated(times: Floats, samples: int) -> tuple[tuple[int, ...], float]:
    """The best of all ways that repeat one size of round, with one round for the rest."""
    sizes = np.arange(1, len(times) + 1)
    turns, rest = np.divmod(samples, sizes)
    taken = turns * times + np.where(rest > 0, times[rest - 1], 0.0)
    best = int(np.argmin(taken))
    last = (int(rest[best]),) if rest[best] else ()
    return (int(sizes[best]),) * int(turns[best]) + last, float(taken[best])
