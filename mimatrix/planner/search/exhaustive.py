"""Exhaustive search: try every combination of largest micro-batches of a small problem."""

from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from mimatrix.planner.search.cost_tables import CostTables, Floats, Integers
from mimatrix.planner.search.independent import Independent, SampleCounts
from mimatrix.planner.search.limits import MAX_COMBINATION_LINES, MAX_COMBINATION_SUMS, MAX_COMBINATIONS
from mimatrix.planner.search.lockstep import Lockstep
from mimatrix.planner.search.water_filling import min_stepping_s


@dataclass(frozen=True)
class BestCombination:
    """The best combination."""

    max_micro_batch: Integers
    bound_s: float
    """No combination takes less, optimizer's step included."""


def try_all_combinations(workload: Independent | Lockstep, tables: CostTables) -> BestCombination | None:
    """Return the best largest micro-batches by trying all; None if there are too many."""
    max_micro_batch = tables.max_micro_batch
    combinations = prod((max_micro_batch + 1).tolist())
    if combinations > MAX_COMBINATIONS or combinations * tables.ranks * tables.seconds.shape[1] > MAX_COMBINATION_SUMS:
        return None
    every = np.array(list(product(*(range(largest + 1) for largest in max_micro_batch))))
    capacity = np.stack(
        [tables.shard_capacity[kind, every[:, rank]] for rank, kind in enumerate(tables.kind_of)], axis=1
    )
    stepping = min_stepping_s(capacity, tables.optimizer_s[tables.kind_of])
    useful = np.isfinite(stepping) & every.any(axis=1)
    every, stepping = every[useful], stepping[useful]
    if isinstance(workload, Lockstep):
        return _by_rounds(workload, tables, every, stepping)
    return _by_time(workload, tables, every, stepping)


def _by_time(workload: Independent, tables: CostTables, every: Integers, stepping: Floats) -> BestCombination | None:
    counts = SampleCounts(tables, workload.samples)
    if not counts.exact:
        return None
    times = counts.times()
    moments = np.unique(times[np.isfinite(times)])
    if len(moments) * len(every) > MAX_COMBINATION_SUMS:
        return None
    # Samples by kind, largest micro-batch and moment.
    done = np.stack([np.searchsorted(row, moments, side="right") - 1 for row in times.reshape(-1, times.shape[2])])
    done = done.reshape(*times.shape[:2], -1)
    total = np.sum([done[kind, every[:, rank]] for rank, kind in enumerate(tables.kind_of)], axis=0)
    seconds = moments[np.argmax(total >= workload.samples, axis=1)] + stepping
    best = int(np.argmin(seconds))
    return BestCombination(every[best], float(seconds[best]))


def _by_rounds(workload: Lockstep, tables: CostTables, every: Integers, stepping: Floats) -> BestCombination:
    """Return the best combination, trying them by their bounds until no other can be better, or enough were tried."""
    bounds = stepping + np.maximum(workload.best(every.max(axis=0)).bound_s, _at_best_rate(workload, tables, every))
    order = np.argsort(bounds, kind="stable")
    best, least_s = every[order[0]], np.inf
    for index in order[: max(1, MAX_COMBINATION_LINES // workload.samples)]:
        if bounds[index] >= least_s:
            return BestCombination(best, least_s)
        total = workload.best(every[index]).seconds + stepping[index]
        if total < least_s:
            best, least_s = every[index], total
    left = bounds[order[max(1, MAX_COMBINATION_LINES // workload.samples) :]]
    return BestCombination(best, min(least_s, float(left.min(initial=np.inf))))


def _at_best_rate(workload: Lockstep, tables: CostTables, every: Integers) -> Floats:
    """Return what all samples take in rounds of the size that is fastest per sample."""
    seconds = tables.seconds[tables.kind_of]
    is_open = np.arange(1, seconds.shape[1]) <= every[:, :, None]
    times = np.sort(np.where(is_open, seconds[:, 1:], np.inf).reshape(len(every), -1), axis=1) + workload.round_s
    rates: Floats = workload.samples * np.min(times / np.arange(1, times.shape[1] + 1), axis=1)
    return rates
