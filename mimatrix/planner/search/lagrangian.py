"""Room for activations against room for states: what ranks choose when room has a price."""

from dataclasses import dataclass, replace

import numpy as np

from mimatrix.planner.search.cost_tables import SLACK, Floats, Integers
from mimatrix.planner.search.knapsack import enough

_HALVINGS = 40
_SINGLY = 32
# Above so many ranks what a single one rounds away is little, and nothing is looked for exactly.
_FEW = 64


@dataclass(frozen=True)
class Trade:
    """What ranks gain at most while they have room for the whole model."""

    bound: float
    """No choice gains more."""
    caps: Integers | None
    """A choice for each rank that has room, and gains near to that; None where there is none."""
    gain: float
    price: float
    """Of room, in gains, where the bound is least."""


class Market:
    """Ranks that choose what to gain and what to hold; those of one kind have a row in common."""

    def __init__(self, kind_of: Integers) -> None:
        self.kind_of = kind_of
        self.counts = np.bincount(kind_of)

    def trade(self, gains: Floats, held: Floats) -> Trade:
        """A column for each rank, so that `held` sums to one or more and `gains` to as much as possible.

        Lagrange: with a price for room every rank chooses for itself, and the price at which there is just enough
        gives a bound. What room is left over goes to those who gain most by it. A gain below 0 cannot be chosen.
        """
        gains = np.where(held >= 0, gains, -np.inf)
        most = np.where(gains >= 0, held, -np.inf)
        if self._sum(most, np.argmax(most, axis=1)) < 1.0 - SLACK:
            return Trade(-np.inf, None, -np.inf, 0.0)
        poor, bound = self._at_price(gains, held, 0.0)
        if self._sum(held, poor) >= 1.0 - SLACK:
            return Trade(bound, poor[self.kind_of], self._sum(gains, poor), 0.0)
        rich, poor, bound, price = self._just_enough(gains, held, poor, bound)
        caps = self._use_up(gains, held, rich[self.kind_of], poor[self.kind_of])
        return Trade(bound, caps, float(gains[self.kind_of, caps].sum()), price)

    def reach(self, gains: Floats, held: Floats, goal: float) -> Trade:
        """The same where all that counts is whether gains of `goal` can be had: for a few ranks exactly."""
        traded = self.trade(gains, held)
        if traded.gain >= goal or traded.bound < goal or len(self.kind_of) > _FEW:
            return traded
        answer = enough(gains[self.kind_of], held[self.kind_of], goal, traded.price)
        if answer.caps is not None:
            return replace(traded, caps=answer.caps, gain=float(gains[self.kind_of, answer.caps].sum()))
        return replace(traded, bound=float(np.nextafter(goal, 0.0))) if answer.certain else traded

    def worth(self, gains: Floats, held: Floats, price: float) -> Floats:
        """What choices come to at a price for room."""
        found: Floats = np.where(held >= 0, gains + price * held, -np.inf)
        return found

    def _just_enough(
        self, gains: Floats, held: Floats, poor: Integers, bound: float
    ) -> tuple[Integers, Integers, float, float]:
        """The choices on both sides of the price at which room is just enough, the least bound and that price."""
        low, high, price = 0.0, max(1.0, float(gains.max())), 0.0
        rich = np.argmax(np.where(gains >= 0, held, -np.inf), axis=1)
        found = False
        for _ in range(_HALVINGS):
            middle = _between(low, high) if found else high
            chosen, said = self._at_price(gains, held, middle)
            bound, price = min((bound, price), (said, middle))
            if self._sum(held, chosen) >= 1.0 - SLACK:
                rich, high, found = chosen, middle, True
            elif found:
                poor, low = chosen, middle
            else:
                poor, low, high = chosen, high, high * 8
            if found and (high - low <= 1e-6 * high or np.array_equal(rich, poor)):
                break
        return rich, poor, bound, price

    def _at_price(self, gains: Floats, held: Floats, price: float) -> tuple[Integers, float]:
        worth = self.worth(gains, held, price)
        chosen = np.argmax(worth, axis=1)
        return chosen, self._sum(worth, chosen) - price

    def _use_up(self, gains: Floats, held: Floats, rich: Integers, poor: Integers) -> Integers:
        """Let ranks go over from the choice with too much room to the one with too little, while there is enough."""
        given = held[self.kind_of, rich] - held[self.kind_of, poor]
        gained = gains[self.kind_of, poor] - gains[self.kind_of, rich]
        spare = float(held[self.kind_of, rich].sum()) - 1.0 + SLACK
        caps = rich.copy()
        able = np.nonzero((gained > 0) & (given > 0))[0]
        for rank in able[np.argsort(given[able] / gained[able], kind="stable")]:
            if given[rank] <= spare:
                caps[rank] = poor[rank]
                spare -= given[rank]
        return self._raise_singly(gains, held, caps, spare)

    def _raise_singly(self, gains: Floats, held: Floats, caps: Integers, spare: float) -> Integers:
        """With what room is left, the best single change of some ranks in turn, those with most room first."""
        has = held[self.kind_of, caps]
        for rank in np.argsort(-has, kind="stable")[:_SINGLY]:
            kind = self.kind_of[rank]
            cost = has[rank] - held[kind]
            open_to = np.where((cost <= spare) & (held[kind] >= 0), gains[kind], -np.inf)
            best = int(np.argmax(open_to))
            if open_to[best] > gains[kind, caps[rank]]:
                caps[rank] = best
                spare -= float(cost[best])
        return caps

    def _sum(self, values: Floats, chosen: Integers) -> float:
        return float(self.counts @ values[np.arange(len(chosen)), chosen])


def _between(low: float, high: float) -> float:
    """In the middle, by factors where they are far apart."""
    return (low + high) / 2 if not low or high < 4 * low else float(np.sqrt(low * high))
