"""Small problems by trying every combination of largest micro-batches."""

from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from mimatrix.planner.search.cost_tables import Floats, Integers, Tables
from mimatrix.planner.search.independent import Alone, Reach
from mimatrix.planner.search.lockstep import Together
from mimatrix.planner.search.water_filling import least_stepping

_COMBINATIONS = 50_000
# Sums that may be formed, and lines of tables for rounds.
_SUMS = 5_000_000
_LINES = 20_000


@dataclass(frozen=True)
class Best:
    """The best combination."""

    caps: Integers
    bound_s: float
    """No combination takes less, optimizer's step included."""


def all_caps(work: Alone | Together, tables: Tables) -> Best | None:
    """The best largest micro-batches, by trying all; None where there are too many."""
    caps = tables.caps
    combinations = prod((caps + 1).tolist())
    if combinations > _COMBINATIONS or combinations * tables.ranks * tables.seconds.shape[1] > _SUMS:
        return None
    every = np.array(list(product(*(range(cap + 1) for cap in caps))))
    held = np.stack([tables.hold[kind, every[:, rank]] for rank, kind in enumerate(tables.kind_of)], axis=1)
    stepping = least_stepping(held, tables.optimizer_s[tables.kind_of])
    useful = np.isfinite(stepping) & every.any(axis=1)
    every, stepping = every[useful], stepping[useful]
    if isinstance(work, Together):
        return _by_rounds(work, tables, every, stepping)
    return _by_time(work, tables, every, stepping)


def _by_time(work: Alone, tables: Tables, every: Integers, stepping: Floats) -> Best | None:
    reach = Reach(tables, work.samples)
    if not reach.exact:
        return None
    times = reach.times()
    moments = np.unique(times[np.isfinite(times)])
    if len(moments) * len(every) > _SUMS:
        return None
    # Samples by kind, largest micro-batch and moment.
    done = np.stack([np.searchsorted(row, moments, side="right") - 1 for row in times.reshape(-1, times.shape[2])])
    done = done.reshape(*times.shape[:2], -1)
    total = np.sum([done[kind, every[:, rank]] for rank, kind in enumerate(tables.kind_of)], axis=0)
    seconds = moments[np.argmax(total >= work.samples, axis=1)] + stepping
    best = int(np.argmin(seconds))
    return Best(every[best], float(seconds[best]))


def _by_rounds(work: Together, tables: Tables, every: Integers, stepping: Floats) -> Best:
    """In the order of what each can reach at best, until no other can be better, or enough were tried."""
    bounds = stepping + np.maximum(work.best(every.max(axis=0)).bound_s, _at_best_rate(work, tables, every))
    order = np.argsort(bounds, kind="stable")
    best, least_s = every[order[0]], np.inf
    for index in order[: max(1, _LINES // work.samples)]:
        if bounds[index] >= least_s:
            return Best(best, least_s)
        total = work.best(every[index]).seconds + stepping[index]
        if total < least_s:
            best, least_s = every[index], total
    left = bounds[order[max(1, _LINES // work.samples) :]]
    return Best(best, min(least_s, float(left.min(initial=np.inf))))


def _at_best_rate(work: Together, tables: Tables, every: Integers) -> Floats:
    """What all samples take in rounds of the size that is best by the sample."""
    seconds = tables.seconds[tables.kind_of]
    open_to = np.arange(1, seconds.shape[1]) <= every[:, :, None]
    times = np.sort(np.where(open_to, seconds[:, 1:], np.inf).reshape(len(every), -1), axis=1) + work.round_s
    rates: Floats = work.samples * np.min(times / np.arange(1, times.shape[1] + 1), axis=1)
    return rates
