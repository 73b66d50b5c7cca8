"""Relaxations of a stage: how long computing takes if shares of a given size must have room, and choices near that."""

from dataclasses import dataclass

import numpy as np

from mimatrix.planner.search.cost_tables import CostTables, Floats, Integers
from mimatrix.planner.search.independent import Independent, SampleCounts, least_time
from mimatrix.planner.search.lagrangian import Lagrangian, LagrangianSolution
from mimatrix.planner.search.limits import MANY_LEVELS, MAX_REFINEMENTS, PRICE_FACTORS, RELAXATION_GAP, SHARE_SLACK
from mimatrix.planner.search.lockstep import Lockstep, Rounds, shortest_rounds


@dataclass(frozen=True)
class RelaxedBound:
    """How long computing takes if the optimizer's step has a time limit."""

    bound_s: float
    """It cannot take less."""
    max_micro_batch: tuple[Integers, ...]
    """Largest micro-batches of the ranks that are worth trying."""


class IndependentRelaxation:
    """Stages 0 and 1: the least time in which ranks that have room for the model can do the samples."""

    def __init__(self, workload: Independent, tables: CostTables, low: float) -> None:
        """Store the problem. `low` is what computing takes at least, with unlimited memory."""
        self.samples = workload.samples
        self.lagrangian = Lagrangian(tables.kind_of)
        self.counts = SampleCounts(tables, workload.samples)
        self.low = low

    def __call__(self, capacity: Floats) -> RelaxedBound:
        """Relax the stage with room for shares of `capacity`."""
        bound_s = least_time(
            lambda t: self._solve(t, capacity, sure=False).bound >= self.samples, self.low, 2 * self.low, RELAXATION_GAP
        )
        if not np.isfinite(bound_s):
            return RelaxedBound(bound_s, ())
        feasible: list[Integers] = []

        def is_feasible(limit: float) -> bool:
            solution = self._solve(limit, capacity, sure=True)
            if solution.max_micro_batch is None or solution.gain < self.samples:
                return False
            feasible.append(solution.max_micro_batch)
            return True

        least_time(is_feasible, bound_s, 1.01 * bound_s, RELAXATION_GAP)
        # The bound was found from above.
        return RelaxedBound(max(self.low, bound_s * (1 - RELAXATION_GAP)), tuple(feasible[-2:]))

    def _solve(self, limit: float, capacity: Floats, sure: bool) -> LagrangianSolution:
        gains = self.counts.min_samples_within(limit) if sure else self.counts.max_samples_within(limit)
        return self.lagrangian.solve_for_goal(gains, capacity, float(self.samples))


class LockstepRelaxation:
    """Rounds: how many samples a round of each length can have if there is room for the model."""

    def __init__(self, workload: Lockstep, tables: CostTables) -> None:
        self.samples = workload.samples
        self.round_s = workload.round_s
        self.lagrangian = Lagrangian(tables.kind_of)
        self.seconds = tables.seconds
        flat = self.seconds[:, 1:].reshape(-1)
        self.order = np.argsort(flat, kind="stable")[: int(np.isfinite(flat).sum())]
        self.levels = flat[self.order]

    def __call__(self, capacity: Floats) -> RelaxedBound:
        """Relax the stage with room for shares of `capacity`."""
        most = self._max_samples(capacity, 0.0)
        level = len(self.levels) - 1
        for _ in range(2):
            price = self._solve(capacity, level).price
            if not np.isfinite(price):
                return RelaxedBound(np.inf, ())
            most = np.min(
                [most, *(self._max_samples(capacity, price * factor) for factor in PRICE_FACTORS if price)], axis=0
            )
            rounds = shortest_rounds(self._times(most), self.samples)
            level = self._level(most, rounds.sizes[0])
        tries = [self._solve(capacity, each).max_micro_batch for each in self._levels_above(level)]
        if len(self.levels) < MANY_LEVELS:
            rounds, sure = self._refine(capacity, self._times(most))
            tries += sure
        return RelaxedBound(rounds.bound_s, tuple(choice for choice in tries if choice is not None))

    def _refine(self, capacity: Floats, times: Floats) -> tuple[Rounds, list[Integers | None]]:
        """Return rounds whose sizes are feasible in their times, each for itself, and the choices that have them.

        Sizes that the best rounds use are looked at exactly. One that is not feasible in its time gets the next one in
        which it is, and the best rounds are looked for again.
        """
        known: dict[int, Integers | None] = {}
        rounds = shortest_rounds(times, self.samples)
        for _ in range(MAX_REFINEMENTS):
            untried = set(rounds.sizes) - set(known)
            for size in sorted(untried):
                level = int(np.searchsorted(self.levels, times[size - 1] - self.round_s - SHARE_SLACK))
                level, known[size] = self._first_feasible(capacity, level, size)
                times[size - 1 :] = np.maximum(times[size - 1 :], self.levels[level] + self.round_s)
            if not untried:
                break
            rounds = shortest_rounds(times, self.samples)
        wanted = sorted(set(rounds.sizes) & set(known), reverse=True)
        return rounds, [known[size] for size in wanted[:2]]

    def _first_feasible(self, capacity: Floats, level: int, size: int) -> tuple[int, Integers | None]:
        """Return the first level from `level` on at which a round can have `size` samples, as far as is known."""
        for each in range(min(level, len(self.levels) - 1), len(self.levels)):
            solution = self._solve(capacity, each, size)
            if solution.bound >= size:
                return each, solution.max_micro_batch if solution.gain >= size else None
        return len(self.levels) - 1, None

    def _solve(self, capacity: Floats, level: int, goal: int | None = None) -> LagrangianSolution:
        """Return the most samples of a round of one length, or whether it can have `goal`."""
        fits = self.seconds <= self.levels[level] * (1 + SHARE_SLACK)
        gains = np.where(fits, np.arange(capacity.shape[1]), -np.inf)
        return (
            self.lagrangian.solve(gains, capacity)
            if goal is None
            else self.lagrangian.solve_for_goal(gains, capacity, goal)
        )

    def _max_samples(self, capacity: Floats, price: float) -> Floats:
        """Return a bound on the samples of a round of each length."""
        worth = self.lagrangian.worth(np.arange(capacity.shape[1], dtype=np.float64), capacity, price)
        worth = np.maximum.accumulate(worth, axis=1)
        more = (np.diff(worth, axis=1) * self.lagrangian.counts[:, None]).reshape(-1)[self.order]
        most: Floats = self.lagrangian.counts @ worth[:, 0] - price + np.cumsum(more)
        return most

    def _times(self, most: Floats) -> Floats:
        """Return the time of a round of m samples, from what rounds of each length have at most."""
        whole = np.floor(most + 1e-9)
        wanted = np.arange(1, max(1, int(whole[-1])) + 1)
        at = np.minimum(np.searchsorted(whole, wanted), len(self.levels) - 1)
        times: Floats = self.levels[at] + self.round_s
        return times

    def _level(self, most: Floats, size: int) -> int:
        return min(int(np.searchsorted(np.floor(most + 1e-9), size)), len(self.levels) - 1)

    def _levels_above(self, level: int) -> set[int]:
        """Return a level and some above it, in case the bound is not reached."""
        steps = (0, 1, 2, 4) if len(self.levels) < MANY_LEVELS else (0, len(self.levels) // 2000)
        return {min(level + step, len(self.levels) - 1) for step in steps}
