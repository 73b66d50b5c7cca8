"""Search one stage: batches, micro-steps and shares, jointly, by branch and bound on the time of the optimizer."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Protocol

import numpy as np

from mimatrix.planner.search.cost_tables import CostTables, Floats, Integers
from mimatrix.planner.search.exhaustive import try_all_combinations
from mimatrix.planner.search.independent import Assignment, Independent, Micro
from mimatrix.planner.search.limits import (
    CERTAIN_GAP,
    MAX_IMPROVED_ENTRIES,
    MAX_SPLIT_ENTRIES,
    MAX_SPLITS,
    SHARE_SLACK,
    SMALL_STAGE_GAP,
    STAGE_GAP,
    STEPPING_GAP,
)
from mimatrix.planner.search.lockstep import Lockstep
from mimatrix.planner.search.relaxations import IndependentRelaxation, LockstepRelaxation, RelaxedBound
from mimatrix.planner.search.water_filling import fill_shares, min_stepping_s


@dataclass(frozen=True)
class StageChoice:
    """The best way that was found to run a stage."""

    micro: Micro
    shares: tuple[float, ...]
    seconds: float
    """Of computing and rounds; what is paid once a step is not included."""
    bound_s: float
    """No other choice takes less."""


class Workload(Protocol):
    """A way to compute a global batch: in lockstep, or each rank independently."""

    def best(self, max_micro_batch: Integers) -> Assignment:
        """Return the shortest assignment with micro-batches of at most `max_micro_batch`."""


def search_with_shares(workload: Workload, tables: CostTables, shares: Floats, stepping_s: float) -> StageChoice:
    """Return the best batches for given shares, with which the optimizer's step takes `stepping_s`; they must fit."""
    best = workload.best(tables.max_micro_batch_beside(shares))
    return StageChoice(best.micro, tuple(shares.tolist()), best.seconds + stepping_s, best.bound_s + stepping_s)


def search_stage(
    workload: Independent | Lockstep, tables: CostTables, below_s: float = np.inf, beaten_s: float = np.inf
) -> StageChoice | None:
    """Return the best batches, micro-steps and shares; None if they soon turn out to take `below_s` or longer.

    The search also ends once it is certain that they take `beaten_s` or longer, with what was found until then. There
    must be room for the states and for one sample.
    """
    free = workload.best(tables.max_micro_batch)
    search = _Search(workload, tables, free.bound_s)
    least_s = search.stepping_of(np.zeros(tables.ranks, np.int64))
    choice = replace(search.evaluate(free, largest_of(free.micro)), bound_s=free.bound_s + least_s)
    if choice.bound_s >= below_s:
        return None
    # If memory does not limit them, computing and stepping are shortest at once, and there is nothing to trade.
    if _is_near(choice, SMALL_STAGE_GAP) or choice.seconds <= free.seconds + least_s * (1 + CERTAIN_GAP):
        return choice
    best = try_all_combinations(workload, tables)
    if best is not None:
        evaluated = search.evaluate(workload.best(best.max_micro_batch), best.max_micro_batch)
        choice = replace(min(choice, evaluated, key=_seconds), bound_s=max(choice.bound_s, best.bound_s))
    if _is_near(choice, STAGE_GAP if best is None else SMALL_STAGE_GAP):
        return choice
    return search.branch_and_bound(choice, least_s, min(below_s, beaten_s))


def _seconds(choice: StageChoice) -> float:
    return choice.seconds


def largest_of(micro: Micro) -> Integers:
    """Return the largest micro-batch of each rank."""
    return np.array([max(sizes, default=0) for sizes in micro])


def _is_near(choice: StageChoice, close: float) -> bool:
    return choice.seconds <= choice.bound_s * (1 + close)


class _Search:
    """The trade of room for activations against room for states.

    The longer the optimizer's step may take, the more a rank may own, and the more the others may compute at once. So
    computing takes less time, the more time tau there is for stepping; between two values of tau no choice is better
    than the lower one with the computing of the upper one. Intervals are split until that bound is close enough.
    """

    def __init__(self, workload: Independent | Lockstep, tables: CostTables, free_s: float) -> None:
        self.workload = workload
        self.tables = tables
        self.optimizer_s = tables.optimizer_s[tables.kind_of]
        self.shard_capacity = tables.shard_capacity[tables.kind_of]
        self._known: dict[bytes, StageChoice] = {}
        self._tries = int(np.clip(MAX_SPLIT_ENTRIES // self.shard_capacity.size, 3, MAX_SPLITS))
        self._free_s = free_s

    @cached_property
    def _relaxation(self) -> Callable[[Floats], RelaxedBound]:
        if isinstance(self.workload, Independent):
            return IndependentRelaxation(self.workload, self.tables, self._free_s)
        return LockstepRelaxation(self.workload, self.tables)

    def stepping_of(self, max_micro_batch: Integers) -> float:
        """Return the shortest step of the optimizer next to these micro-batches; infinite if there is no room."""
        return float(min_stepping_s(self.tables.shard_capacity_beside(max_micro_batch)[None], self.optimizer_s)[0])

    def evaluate(self, assignment: Assignment, max_micro_batch: Integers) -> StageChoice:
        """Return an assignment with the best shares that have room next to it; infinitely long if there is no room."""
        stepping_s = self.stepping_of(np.minimum(max_micro_batch, largest_of(assignment.micro)))
        if not np.isfinite(stepping_s):
            return StageChoice(assignment.micro, (), np.inf, 0.0)
        shares = fill_shares(self.tables.shard_capacity_beside(largest_of(assignment.micro)), self.optimizer_s)
        return StageChoice(assignment.micro, tuple(shares.tolist()), assignment.seconds + stepping_s, 0.0)

    def branch_and_bound(self, best: StageChoice, least_s: float, beaten_s: float) -> StageChoice:
        """Improve `best` and its bound by splitting intervals of tau, until the bound reaches `beaten_s`."""
        order, proven = count(), best.bound_s
        unlimited = self._relax(np.inf)
        best = self._better(best, unlimited.max_micro_batch)
        best = self._better(best, self._relax(least_s).max_micro_batch)
        if not np.isfinite(best.seconds):
            best = self._better(best, self._one_rank_computes())
        computing = max(self._free_s, unlimited.bound_s)
        spans = [(least_s + computing, next(order), least_s, max(least_s, best.seconds - computing), computing)]
        for _ in range(self._tries):
            bound, _, low, high, computing = spans[0]
            if best.seconds <= bound * (1 + STAGE_GAP) or high - low <= STEPPING_GAP * bound or bound >= beaten_s:
                break
            heapq.heappop(spans)
            middle = (low + high) / 2 if high < 4 * low else float(np.sqrt(low * high))
            relaxed = self._relax(middle)
            best = self._better(best, relaxed.max_micro_batch)
            heapq.heappush(spans, (low + max(computing, relaxed.bound_s), next(order), low, middle, relaxed.bound_s))
            heapq.heappush(spans, (middle + computing, next(order), middle, high, computing))
        bound = max(proven, spans[0][0])
        if bound * (1 + STAGE_GAP) < min(best.seconds, beaten_s) and self.shard_capacity.size < MAX_IMPROVED_ENTRIES:
            best = self._improve(best)
        return replace(best, bound_s=min(best.seconds, bound))

    def _improve(self, best: StageChoice) -> StageChoice:
        """Improve a choice by single steps up and down, and by steps up of one rank and down of another."""
        steps = np.eye(self.tables.ranks, dtype=np.int64)
        moves = [*steps, *-steps, *(up - down for up in steps for down in steps if up is not down)]
        for _ in range(MAX_SPLITS):
            max_micro_batch = largest_of(best.micro)
            near = [np.clip(max_micro_batch + move, 0, self.tables.max_micro_batch) for move in moves]
            better = self._better(best, tuple(each for each in near if np.isfinite(self.stepping_of(each))))
            if better is best:
                break
            best = better
        return best

    def _relax(self, tau: float) -> RelaxedBound:
        return self._relaxation(np.minimum(self.tables.shard_capacity, tau / self.tables.optimizer_s[:, None]))

    def _one_rank_computes(self) -> tuple[Integers, ...]:
        """Return choices in which one rank computes everything: with little memory there may be no others."""
        beside = np.maximum(self.shard_capacity[:, 0], 0.0)
        tries = []
        for rank in np.argsort(-self.tables.max_micro_batch, kind="stable")[: self._tries]:
            fits = self.shard_capacity[rank] + beside.sum() - beside[rank] >= 1.0 - SHARE_SLACK
            max_micro_batch = np.zeros(self.tables.ranks, np.int64)
            max_micro_batch[rank] = int((fits & (self.shard_capacity[rank] >= 0)).sum()) - 1
            if max_micro_batch[rank] > 0:
                tries.append(max_micro_batch)
        return tuple(tries)

    def _better(self, best: StageChoice, tries: tuple[Integers, ...]) -> StageChoice:
        for max_micro_batch in tries:
            if max_micro_batch.tobytes() not in self._known and max_micro_batch.any():
                self._known[max_micro_batch.tobytes()] = self.evaluate(
                    self.workload.best(max_micro_batch), max_micro_batch
                )
                best = min(best, self._known[max_micro_batch.tobytes()], key=_seconds)
        return best
