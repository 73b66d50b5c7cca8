"""Pareto knapsack: find exactly whether some ranks can gain enough while they have room for the whole model."""

from dataclasses import dataclass

import numpy as np

from mimatrix.planner.search.cost_tables import Floats, Integers
from mimatrix.planner.search.limits import MAX_PARTIAL_CHOICES, SHARE_SLACK


@dataclass(frozen=True)
class KnapsackChoice:
    """A choice, or None: there is none, or too many had to be looked at."""

    max_micro_batch: Integers | None
    certain: bool
    """Whether None means that there is none."""


def find_choice(gains: Floats, capacity: Floats, goal: float, price: float) -> KnapsackChoice:
    """Choose a column for each rank (row), so that `gains` sum to `goal` and `capacity` to one, or more.

    Ranks choose one after the other, and a partial choice is dropped that another one beats in both sums, or that
    cannot reach both sums any more: at the price for room, what all ranks choose must be worth goal + price, and the
    ranks to come can add only their best.
    """
    worth = np.where((gains >= 0) & (capacity >= 0), gains + price * capacity, -np.inf)
    best = worth.max(axis=1)
    wanted = (goal + price) * (1 - SHARE_SLACK)
    spare = float(best.sum()) - wanted
    to_come = np.append(np.cumsum(best[::-1])[::-1], 0.0)
    gained, room = np.zeros(1), np.zeros(1)
    steps: list[tuple[Integers, Integers]] = []
    for rank in range(len(gains)):
        options = np.nonzero(worth[rank] >= best[rank] - spare - SHARE_SLACK * wanted)[0]
        if len(gained) * len(options) > 50 * MAX_PARTIAL_CHOICES:
            return KnapsackChoice(None, certain=False)
        more = (gained[:, None] + gains[rank, options]).reshape(-1)
        capacity_then = (room[:, None] + capacity[rank, options]).reshape(-1)
        kept = _pareto_front(more, capacity_then, more + price * capacity_then + to_come[rank + 1] >= wanted)
        if not len(kept) or len(kept) > MAX_PARTIAL_CHOICES:
            return KnapsackChoice(None, certain=not len(kept))
        steps.append((kept // len(options), options[kept % len(options)]))
        gained, room = more[kept], capacity_then[kept]
    good = np.nonzero((room >= 1.0 - SHARE_SLACK) & (gained >= goal - 1e-9))[0]
    return KnapsackChoice(_trace_back(steps, int(good[np.argmax(gained[good])])) if len(good) else None, certain=True)


def _pareto_front(gained: Floats, room: Floats, open_to: Floats) -> Integers:
    """Return the places of the partial choices that no other beats in both gain and room."""
    places = np.nonzero(open_to)[0]
    places = places[np.lexsort((-room[places], -gained[places]))]
    ahead = np.maximum.accumulate(np.append(-np.inf, room[places]))[:-1]
    front: Integers = places[room[places] > ahead]
    return front


def _trace_back(steps: list[tuple[Integers, Integers]], place: int) -> Integers:
    chosen = []
    for parents, options in reversed(steps):
        chosen.append(int(options[place]))
        place = int(parents[place])
    return np.array(chosen[::-1])
