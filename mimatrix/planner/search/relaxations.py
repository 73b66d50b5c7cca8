"""What computing takes where shares of a given size must have room: bounds, and choices that come near to them."""

from dataclasses import dataclass

import numpy as np

from mimatrix.planner.search.cost_tables import SLACK, Floats, Integers, Tables
from mimatrix.planner.search.independent import Alone, Reach, least
from mimatrix.planner.search.lagrangian import Market, Trade
from mimatrix.planner.search.lockstep import Sizes, Together, fewest_seconds

_CLOSE = 1e-4
# Prices are tried around the best one: what is a little too dear for one length of round is right for another.
_AROUND = np.array([0.4, 0.7, 0.9, 1.0, 1.1, 1.5, 2.5])
_LARGE = 5_000
_REFINED = 40


@dataclass(frozen=True)
class Attempt:
    """What computing takes if the optimizer's step may take so long."""

    bound_s: float
    """It cannot take less."""
    caps: tuple[Integers, ...]
    """Largest micro-batches of the ranks that are worth a look."""


class AloneAttempts:
    """Stages 0 and 1: the least time in which ranks that have room for the model can do the samples."""

    def __init__(self, work: Alone, tables: Tables, low: float) -> None:
        """`low` is what computing takes at least, whatever has room."""
        self.samples = work.samples
        self.market = Market(tables.kind_of)
        self.reach = Reach(tables, work.samples)
        self.low = low

    def __call__(self, held: Floats) -> Attempt:
        """With room for shares of `held`."""
        bound = least(lambda t: self._trade(t, held, sure=False).bound >= self.samples, self.low, 2 * self.low, _CLOSE)
        if not np.isfinite(bound):
            return Attempt(bound, ())
        found: list[Integers] = []

        def can(limit: float) -> bool:
            traded = self._trade(limit, held, sure=True)
            if traded.caps is None or traded.gain < self.samples:
                return False
            found.append(traded.caps)
            return True

        least(can, bound, 1.01 * bound, _CLOSE)
        # It was found from above.
        return Attempt(max(self.low, bound * (1 - _CLOSE)), tuple(found[-2:]))

    def _trade(self, limit: float, held: Floats, sure: bool) -> Trade:
        return self.market.reach(
            self.reach.surely(limit) if sure else self.reach.at_most(limit), held, float(self.samples)
        )


class TogetherAttempts:
    """Rounds: how many samples a round of each length can have while there is room for the model."""

    def __init__(self, work: Together, tables: Tables) -> None:
        self.samples = work.samples
        self.round_s = work.round_s
        self.market = Market(tables.kind_of)
        self.seconds = tables.seconds
        flat = self.seconds[:, 1:].reshape(-1)
        self.order = np.argsort(flat, kind="stable")[: int(np.isfinite(flat).sum())]
        self.levels = flat[self.order]

    def __call__(self, held: Floats) -> Attempt:
        """With room for shares of `held`."""
        most = self._most(held, 0.0)
        level = len(self.levels) - 1
        for _ in range(2):
            price = self._trade(held, level).price
            if not np.isfinite(price):
                return Attempt(np.inf, ())
            most = np.min([most, *(self._most(held, price * factor) for factor in _AROUND if price)], axis=0)
            found = fewest_seconds(self._times(most), self.samples)
            level = self._level(most, found.sizes[0])
        tries = [self._trade(held, each).caps for each in self._near(level)]
        if len(self.levels) < _LARGE:
            found, sure = self._refined(held, self._times(most))
            tries += sure
        return Attempt(found.bound_s, tuple(caps for caps in tries if caps is not None))

    def _refined(self, held: Floats, times: Floats) -> tuple[Sizes, list[Integers | None]]:
        """Rounds whose sizes can be had in their times, each for itself; and the choices that have them.

        Sizes that the best rounds use are looked at exactly. One that cannot be had in its time gets the next one in
        which it can, and the best rounds are looked for again.
        """
        known: dict[int, Integers | None] = {}
        found = fewest_seconds(times, self.samples)
        for _ in range(_REFINED):
            open_to = set(found.sizes) - set(known)
            for size in sorted(open_to):
                level = int(np.searchsorted(self.levels, times[size - 1] - self.round_s - SLACK))
                level, known[size] = self._first(held, level, size)
                times[size - 1 :] = np.maximum(times[size - 1 :], self.levels[level] + self.round_s)
            if not open_to:
                break
            found = fewest_seconds(times, self.samples)
        wanted = sorted(set(found.sizes) & set(known), reverse=True)
        return found, [known[size] for size in wanted[:2]]

    def _first(self, held: Floats, level: int, size: int) -> tuple[int, Integers | None]:
        """The first level from `level` on at which a round can have `size` samples, as far as can be told."""
        for each in range(min(level, len(self.levels) - 1), len(self.levels)):
            traded = self._trade(held, each, size)
            if traded.bound >= size:
                return each, traded.caps if traded.gain >= size else None
        return len(self.levels) - 1, None

    def _trade(self, held: Floats, level: int, goal: int | None = None) -> Trade:
        """The most samples of a round of one length, or whether it can have `goal`."""
        fits = self.seconds <= self.levels[level] * (1 + SLACK)
        gains = np.where(fits, np.arange(held.shape[1]), -np.inf)
        return self.market.trade(gains, held) if goal is None else self.market.reach(gains, held, goal)

    def _most(self, held: Floats, price: float) -> Floats:
        """For every length of a round, no more samples than this."""
        worth = self.market.worth(np.arange(held.shape[1], dtype=np.float64), held, price)
        worth = np.maximum.accumulate(worth, axis=1)
        more = (np.diff(worth, axis=1) * self.market.counts[:, None]).reshape(-1)[self.order]
        most: Floats = self.market.counts @ worth[:, 0] - price + np.cumsum(more)
        return most

    def _times(self, most: Floats) -> Floats:
        """The time of a round of m samples, from what rounds of each length have at most."""
        whole = np.floor(most + 1e-9)
        wanted = np.arange(1, max(1, int(whole[-1])) + 1)
        at = np.minimum(np.searchsorted(whole, wanted), len(self.levels) - 1)
        times: Floats = self.levels[at] + self.round_s
        return times

    def _level(self, most: Floats, size: int) -> int:
        return min(int(np.searchsorted(np.floor(most + 1e-9), size)), len(self.levels) - 1)

    def _near(self, level: int) -> set[int]:
        """A level and some above it: what is left over when the bound is not reached."""
        steps = (0, 1, 2, 4) if len(self.levels) < _LARGE else (0, len(self.levels) // 2000)
        return {min(level + step, len(self.levels) - 1) for step in steps}
