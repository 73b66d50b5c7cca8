"""Lagrangian relaxation: what ranks choose between activations and states if room has a price."""

from dataclasses import dataclass, replace

import numpy as np

from mimatrix.planner.search.cost_tables import Floats, Integers
from mimatrix.planner.search.knapsack import find_choice
from mimatrix.planner.search.limits import MAX_KNAPSACK_RANKS, MAX_SINGLE_RAISES, PRICE_GAP, PRICE_HALVINGS, SHARE_SLACK


@dataclass(frozen=True)
class LagrangianSolution:
    """How much ranks gain at most while they have room for the whole model."""

    bound: float
    """No choice gains more."""
    max_micro_batch: Integers | None
    """A choice for each rank that has room, and gains close to the bound; None if there is none."""
    gain: float
    price: float
    """Of room, in gains, at which the bound is least."""


class Lagrangian:
    """The choice of all ranks what to gain and what to hold; ranks of one kind share a row."""

    def __init__(self, kind_of: Integers) -> None:
        self.kind_of = kind_of
        self.counts = np.bincount(kind_of)

    def solve(self, gains: Floats, capacity: Floats) -> LagrangianSolution:
        """Choose a column for each rank, so that `capacity` sums to one or more and `gains` to as much as possible.

        With a price for room every rank chooses for itself, and the price at which there is just enough room gives a
        bound. Room that is left over goes to the ranks that gain most by it. A gain below 0 cannot be chosen.
        """
        gains = np.where(capacity >= 0, gains, -np.inf)
        most = np.where(gains >= 0, capacity, -np.inf)
        if self._sum(most, np.argmax(most, axis=1)) < 1.0 - SHARE_SLACK:
            return LagrangianSolution(-np.inf, None, -np.inf, 0.0)
        poor, bound = self._at_price(gains, capacity, 0.0)
        if self._sum(capacity, poor) >= 1.0 - SHARE_SLACK:
            return LagrangianSolution(bound, poor[self.kind_of], self._sum(gains, poor), 0.0)
        rich, poor, bound, price = self._just_enough(gains, capacity, poor, bound)
        max_micro_batch = self._spend_room(gains, capacity, rich[self.kind_of], poor[self.kind_of])
        return LagrangianSolution(bound, max_micro_batch, float(gains[self.kind_of, max_micro_batch].sum()), price)

    def solve_for_goal(self, gains: Floats, capacity: Floats, goal: float) -> LagrangianSolution:
        """Return a choice that gains `goal`, if there is one; with few ranks that is decided exactly."""
        solution = self.solve(gains, capacity)
        if solution.gain >= goal or solution.bound < goal or len(self.kind_of) > MAX_KNAPSACK_RANKS:
            return solution
        answer = find_choice(gains[self.kind_of], capacity[self.kind_of], goal, solution.price)
        if answer.max_micro_batch is not None:
            return replace(
                solution,
                max_micro_batch=answer.max_micro_batch,
                gain=float(gains[self.kind_of, answer.max_micro_batch].sum()),
            )
        return replace(solution, bound=float(np.nextafter(goal, 0.0))) if answer.certain else solution

    def worth(self, gains: Floats, capacity: Floats, price: float) -> Floats:
        """Return what choices are worth at a price for room."""
        worth: Floats = np.where(capacity >= 0, gains + price * capacity, -np.inf)
        return worth

    def _just_enough(
        self, gains: Floats, capacity: Floats, poor: Integers, bound: float
    ) -> tuple[Integers, Integers, float, float]:
        """Return the choices on both sides of the price at which room just suffices, the least bound and that price."""
        low, high, price = 0.0, max(1.0, float(gains.max())), 0.0
        rich = np.argmax(np.where(gains >= 0, capacity, -np.inf), axis=1)
        is_bracketed = False
        for _ in range(PRICE_HALVINGS):
            middle = _between(low, high) if is_bracketed else high
            chosen, dual = self._at_price(gains, capacity, middle)
            bound, price = min((bound, price), (dual, middle))
            if self._sum(capacity, chosen) >= 1.0 - SHARE_SLACK:
                rich, high, is_bracketed = chosen, middle, True
            elif is_bracketed:
                poor, low = chosen, middle
            else:
                poor, low, high = chosen, high, high * 8
            if is_bracketed and (high - low <= PRICE_GAP * high or np.array_equal(rich, poor)):
                break
        return rich, poor, bound, price

    def _at_price(self, gains: Floats, capacity: Floats, price: float) -> tuple[Integers, float]:
        worth = self.worth(gains, capacity, price)
        chosen = np.argmax(worth, axis=1)
        return chosen, self._sum(worth, chosen) - price

    def _spend_room(self, gains: Floats, capacity: Floats, rich: Integers, poor: Integers) -> Integers:
        """Move ranks from the choice with too much room to the one with too little, while there is enough."""
        given = capacity[self.kind_of, rich] - capacity[self.kind_of, poor]
        gained = gains[self.kind_of, poor] - gains[self.kind_of, rich]
        spare = float(capacity[self.kind_of, rich].sum()) - 1.0 + SHARE_SLACK
        max_micro_batch = rich.copy()
        able = np.nonzero((gained > 0) & (given > 0))[0]
        for rank in able[np.argsort(given[able] / gained[able], kind="stable")]:
            if given[rank] <= spare:
                max_micro_batch[rank] = poor[rank]
                spare -= given[rank]
        return self._raise_singly(gains, capacity, max_micro_batch, spare)

    def _raise_singly(self, gains: Floats, capacity: Floats, max_micro_batch: Integers, spare: float) -> Integers:
        """Spend the room that is left on the best single change of some ranks in turn, those with most room first."""
        has = capacity[self.kind_of, max_micro_batch]
        for rank in np.argsort(-has, kind="stable")[:MAX_SINGLE_RAISES]:
            kind = self.kind_of[rank]
            cost = has[rank] - capacity[kind]
            open_to = np.where((cost <= spare) & (capacity[kind] >= 0), gains[kind], -np.inf)
            best = int(np.argmax(open_to))
            if open_to[best] > gains[kind, max_micro_batch[rank]]:
                max_micro_batch[rank] = best
                spare -= float(cost[best])
        return max_micro_batch

    def _sum(self, values: Floats, chosen: Integers) -> float:
        return float(self.counts @ values[np.arange(len(chosen)), chosen])


def _between(low: float, high: float) -> float:
    """Return the middle, by factors if they are far apart."""
    return (low + high) / 2 if not low or high < 4 * low else float(np.sqrt(low * high))
