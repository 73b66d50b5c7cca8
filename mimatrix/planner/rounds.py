"""Rounds of micro-batches in which all ranks meet: stages 2 and 3, and any stage where samples belong together."""

from dataclasses import dataclass

import numpy as np

from mimatrix.planner.micro_steps import LINES, Found, Shortest, trimmed
from mimatrix.planner.tables import Floats, Integers, Tables

# How many sums the search over rounds may form; above it samples are counted by the unit, and the bound says so.
_WORK = 2_000_000
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
    """Ranks that meet in every micro-step: a round takes as long as its slowest rank, and `round_s` on top."""

    def __init__(self, tables: Tables, samples: int, round_s: float) -> None:
        self.tables = tables
        self.samples = samples
        self.round_s = round_s

    def best(self, caps: Integers) -> Found:
        """The shortest way with micro-batches of at most `caps`; one of them must be 1 or more."""
        seconds = self.tables.seconds[self.tables.kind_of]
        open_to = (np.arange(seconds.shape[1]) <= caps[:, None])[:, 1:]
        # A rank that takes T(b) for b samples adds its b-th sample to a round when the round is T(b) long. So the
        # time of a round of m samples is the m-th of all these times in order.
        levels = np.sort(seconds[:, 1:][open_to])
        found = fewest_seconds(levels + self.round_s, self.samples)
        micro = self._filled(found.sizes, levels, np.where(open_to, seconds[:, 1:], np.inf))
        taken = sum(
            max(seconds[rank, sizes[turn]] for rank, sizes in enumerate(micro) if turn < len(sizes)) + self.round_s
            for turn in range(max(map(len, micro)))
        )
        return Found(micro, float(taken), min(float(taken), found.bound_s))

    def _filled(self, sizes: tuple[int, ...], levels: Floats, seconds: Floats) -> tuple[tuple[int, ...], ...]:
        """The micro-batches of each rank. All rounds but the last are as full as their time allows.

        So a rank's micro-batches never grow from round to round, and one that has none in a round has none after it.
        """
        rounds: list[Integers] = []
        left = self.samples
        for size in sizes:
            if left <= 0:
                break
            full = (seconds <= levels[size - 1]).sum(axis=1)
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
    unit = int(np.ceil(max(1.0, np.sqrt(samples * len(times) / _WORK), samples / LINES)))
    needed = -(-samples // unit)
    # Rounds counted by the unit: whole units can be had, and begun ones, each for the time of its first sample, are
    # a bound. With a unit of one they are the same.
    begun = Shortest(np.concatenate(([0.0], times[::unit]))[None], np.array([needed]))
    lowest = max(lowest, float(begun.times[needed, 0]))
    cut = tuple(size * unit for size in _cut(begun, needed)) if unit == 1 else _whole(times, unit, needed)
    cut_s = float(sum(times[size - 1] for size in cut))
    return Sizes(cut, min(lowest, cut_s)) if cut and cut_s < taken else Sizes(repeated, min(lowest, taken))


def _whole(times: Floats, unit: int, needed: int) -> tuple[int, ...]:
    if unit > len(times):
        return ()
    by_unit = Shortest(np.concatenate(([0.0], times[unit - 1 :: unit]))[None], np.array([needed]))
    return tuple(size * unit for size in _cut(by_unit, needed))


def _cut(shortest: Shortest, samples: int) -> tuple[int, ...]:
    return shortest.cut(np.zeros(1, np.int64), np.array([samples]))[0]


def _repeated(times: Floats, samples: int) -> tuple[tuple[int, ...], float]:
    """The best of all ways that repeat one size of round, with one round for the rest."""
    sizes = np.arange(1, len(times) + 1)
    turns, rest = np.divmod(samples, sizes)
    taken = turns * times + np.where(rest > 0, times[rest - 1], 0.0)
    best = int(np.argmin(taken))
    last = (int(rest[best]),) if rest[best] else ()
    return (int(sizes[best]),) * int(turns[best]) + last, float(taken[best])
