"""Choices of a few ranks, exactly: is there one that gains enough and has room for the whole model?"""

from dataclasses import dataclass

import numpy as np

from mimatrix.planner.search.cost_tables import SLACK, Floats, Integers

# So many partial choices may be open at once; beyond that nothing is said.
_OPEN = 20_000


@dataclass(frozen=True)
class Answer:
    """A choice, or None: there is none, or none was found among too many to look at."""

    caps: Integers | None
    certain: bool


def enough(gains: Floats, held: Floats, goal: float, price: float) -> Answer:
    """A column for each rank (row), so that `gains` sum to `goal` and `held` to one, or more.

    Ranks choose one after the other, and a partial choice is dropped that another one beats in both sums, or that
    cannot come to enough any more: at the price for room, what all ranks choose must be worth goal + price, and the
    ranks to come can add only their best.
    """
    worth = np.where((gains >= 0) & (held >= 0), gains + price * held, -np.inf)
    best = worth.max(axis=1)
    wanted = (goal + price) * (1 - SLACK)
    spare = float(best.sum()) - wanted
    to_come = np.append(np.cumsum(best[::-1])[::-1], 0.0)
    gained, room = np.zeros(1), np.zeros(1)
    steps: list[tuple[Integers, Integers]] = []
    for rank in range(len(gains)):
        options = np.nonzero(worth[rank] >= best[rank] - spare - SLACK * wanted)[0]
        if len(gained) * len(options) > 50 * _OPEN:
            return Answer(None, certain=False)
        more = (gained[:, None] + gains[rank, options]).reshape(-1)
        held_then = (room[:, None] + held[rank, options]).reshape(-1)
        kept = _unbeaten(more, held_then, more + price * held_then + to_come[rank + 1] >= wanted)
        if not len(kept) or len(kept) > _OPEN:
            return Answer(None, certain=not len(kept))
        steps.append((kept // len(options), options[kept % len(options)]))
        gained, room = more[kept], held_then[kept]
    good = np.nonzero((room >= 1.0 - SLACK) & (gained >= goal - 1e-9))[0]
    return Answer(_traced(steps, int(good[np.argmax(gained[good])])) if len(good) else None, certain=True)


def _unbeaten(gained: Floats, room: Floats, open_to: Floats) -> Integers:
    """The places of those that no other has both more gain and more room than."""
    places = np.nonzero(open_to)[0]
    places = places[np.lexsort((-room[places], -gained[places]))]
    ahead = np.maximum.accumulate(np.append(-np.inf, room[places]))[:-1]
    found: Integers = places[room[places] > ahead]
    return found


def _traced(steps: list[tuple[Integers, Integers]], place: int) -> Integers:
    chosen = []
    for parents, options in reversed(steps):
        chosen.append(int(options[place]))
        place = int(parents[place])
    return np.array(chosen[::-1])
