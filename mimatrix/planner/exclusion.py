"""Which devices a job is better off without: tried one by one, and in sets that may hold it up together."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations

import numpy as np

from mimatrix.planner.memory_fit import able, lacks
from mimatrix.planner.model.problem import Priced, Problem
from mimatrix.planner.model.profile import Profile
from mimatrix.planner.search.cost_tables import Floats

Members = tuple[int, ...]
Price = Callable[[Members, float], tuple[Priced, ...]]
"""The best of every stage for some ranks; nothing where it is soon seen to take so many seconds or more."""

# A device must cost more than this to be worth leaving out; of sets that gain the same the smallest is taken.
_GAIN = 1e-2
_SAME = 1e-3
# Up to so many ranks brakes are looked for; up to so many all pairs are asked what they pay.
MOST = 64
_EACH = 16
# Sets of one sort that are tried, and devices of a set that may be taken back.
_SETS = 12
_BACK = 8


@dataclass(frozen=True)
class Removal:
    """Ranks that were taken away at once, and the plans before (none where nothing fitted) and after that."""

    ranks: Members
    before: tuple[Priced, ...]
    after: tuple[Priced, ...]


def removals(problem: Problem, priced: tuple[Priced, ...], price: Price) -> list[Removal]:
    """Sets of ranks without which the step is shorter, one after the other. `priced` is of all ranks."""
    found: list[Removal] = []
    members = tuple(range(len(problem.profiles)))
    search = _Brakes(problem, price)
    while len(members) > 1:
        after = search.better(members, priced)
        if not after:
            break
        kept = after[0].members
        found.append(Removal(tuple(rank for rank in members if rank not in kept), priced, after))
        priced, members = after, kept
    return found


class _Brakes:
    def __init__(self, problem: Problem, price: Price) -> None:
        self._problem = problem
        self._price = price

    def better(self, members: Members, priced: tuple[Priced, ...]) -> tuple[Priced, ...]:
        """The shortest plan with fewer members that gains enough; nothing where there is none."""
        below_s = priced[0].cost.step_s / (1 + _GAIN) if priced else np.inf
        found: list[tuple[Priced, ...]] = []
        for rest in self._rests(members):
            shortest_s = min(map(_seconds, found), default=np.inf)
            found.append(self._tried(rest, min(below_s, shortest_s * (1 + _SAME)), priced))
            found = [each for each in found if each]
        if not found:
            return ()
        shortest_s = min(map(_seconds, found))
        near = [each for each in found if _seconds(each) <= shortest_s * (1 + _SAME)]
        return self._taken_back(members, max(near, key=lambda each: len(each[0].members)))

    def _tried(self, rest: Members, below_s: float, instead: tuple[Priced, ...] = ()) -> tuple[Priced, ...]:
        """The plan of `rest` if it takes less than `below_s`; none where it is sure to gain nothing over `instead`."""
        # Computing at their best all the time, and moving what two of them would pay: mostly that is too long already.
        paid_s = max((paid for pair, paid in self._paid.items() if set(pair) <= set(rest)), default=0.0)
        rates = self._rates(below_s)
        if self._problem.global_batch >= (below_s - paid_s) * sum(rates[rank] for rank in rest):
            return ()
        if self._is_vain(rest, instead):
            return ()
        priced = self._price(rest, below_s)
        return priced if priced and _seconds(priced) < below_s else ()

    def _is_vain(self, rest: Members, priced: tuple[Priced, ...]) -> bool:
        """Whether it is sure that `rest` alone gain nothing: the others could stay with no samples and no share.

        So they could unless they make moving data longer, or a stage too large, or the optimizer's step, where all do
        all of it.
        """
        unfit = set(self._problem.stages) - {each.stage for each in priced}
        if not priced or not all(self._lacks(stage, rest) for stage in unfit):
            return False
        now, then = self._problem.network(priced[0].members), self._problem.network(rest)
        both = zip((*now.once_s, *now.round_s), (*then.once_s, *then.round_s), strict=True)
        stepping = [self._problem.profiles[rank].optimizer_s for rank in priced[0].members]
        slowest_s = max(self._problem.profiles[rank].optimizer_s for rank in rest)
        return all(before <= after for before, after in both) and (
            0 not in self._problem.stages or max(stepping) <= slowest_s
        )

    def _lacks(self, stage: int, members: Members) -> bool:
        profiles = [self._problem.profiles[rank] for rank in members]
        return bool(lacks(stage, self._problem.model, profiles, self._problem.names, None))

    def _taken_back(self, members: Members, best: tuple[Priced, ...]) -> tuple[Priced, ...]:
        """With those again that were in the set but do no harm."""
        limit_s = np.nextafter(_seconds(best) * (1 + _GAIN), np.inf)
        for _ in range(_BACK):
            kept = best[0].members
            missing = [rank for rank in members if rank not in kept]
            if len(missing) < 2:
                break
            tries = [self._tried(each, limit_s) for each in self._unlike(missing, partial(_with, kept))]
            if not any(tries):
                break
            best = min(filter(None, tries), key=_seconds)
        return best

    def _rests(self, members: Members) -> list[Members]:
        """What may be left: without a set, without one; each once, what may be worth most first."""
        sets: dict[Members, None] = {}
        if len(members) <= MOST:
            sets |= dict.fromkeys(self._near(members))
        for stage in self._problem.stages:
            sets[able(self._problem.model, stage, self._problem.profiles, members)] = None
        if len(members) <= MOST:
            sets |= dict.fromkeys((*self._ordered(members), *self._kinds(members)))
            rates = self._rates(np.inf)
            slowest = members if len(members) <= _EACH else sorted(members, key=lambda rank: rates[rank])[:_EACH]
            sets |= dict.fromkeys(self._unlike(slowest, partial(_without, members)))
        return [rest for rest in sets if 0 < len(rest) < len(members)]

    def _unlike(self, ranks: Iterable[int], then: Callable[[int], Members]) -> list[Members]:
        """`then` of each rank, once for those that are alike: as a device, and in what pairs with it pay."""
        found = {(self._problem.profiles[rank], self._links[rank]): then(rank) for rank in sorted(ranks, reverse=True)}
        return list(found.values())

    def _ordered(self, members: Members) -> Iterator[Members]:
        """The fastest, those with most room, those that step the optimizer soonest: so many of them."""
        profiles = self._problem.profiles
        for worth in (
            self._rates(np.inf),
            [float(profile.room_bytes) for profile in profiles],
            [-profile.optimizer_s for profile in profiles],
        ):
            steps = sorted({worth[rank] for rank in members})[1:]
            for least in steps[:: -(-len(steps) // _SETS) or 1]:
                yield tuple(rank for rank in members if worth[rank] >= least)

    def _kinds(self, members: Members) -> Iterator[Members]:
        """Those of one kind, and all others."""
        kinds: dict[str, list[int]] = {}
        for rank in members:
            kinds.setdefault(self._problem.profiles[rank].device, []).append(rank)
        for ranks in list(kinds.values())[:_SETS]:
            yield tuple(ranks)
            yield tuple(rank for rank in members if rank not in ranks)

    def _near(self, members: Members) -> Iterator[Members]:
        """Those that are near to one another on the network: joined by pairs that pay no more than some limit."""
        paid = {pair: paid_s for pair, paid_s in self._paid.items() if set(pair) <= set(members)}
        limits = sorted(set(paid.values()), reverse=True)[1:]
        for limit_s in limits[:: -(-len(limits) // _SETS) or 1]:
            islands = _islands(members, [pair for pair, paid_s in paid.items() if paid_s <= limit_s])
            yield from sorted(islands, key=len, reverse=True)[:2]

    @cached_property
    def _paid(self) -> dict[tuple[int, int], float]:
        """What pairs of ranks would pay at least for a step, in the stages that may be chosen."""
        if len(self._problem.profiles) > MOST:
            return {}
        paid = {pair: self._problem.network(pair) for pair in _pairs(range(len(self._problem.profiles)))}
        stages = self._problem.stages
        return {pair: min(each.once_s[stage] + each.round_s[stage] for stage in stages) for pair, each in paid.items()}

    @cached_property
    def _links(self) -> list[tuple[float, ...]]:
        """What each rank pays in pairs; with many ranks the least of it, since not all pairs are asked."""
        paid: list[list[float]] = [[] for _ in self._problem.profiles]
        for pair, paid_s in self._paid.items():
            for rank in pair:
                paid[rank].append(float(f"{paid_s:.6g}"))
        few = len(paid) <= _EACH
        return [tuple(sorted(each)[: None if few else 1]) for each in paid]

    def _rates(self, limit_s: float) -> list[float]:
        """The most samples a second of each rank, with whatever micro-batches that take no longer."""
        found = {
            profile: float(rates[np.searchsorted(profile.seconds.table, limit_s, side="right") - 1])
            for profile, rates in self._best_rates.items()
        }
        return [found[profile] for profile in self._problem.profiles]

    @cached_property
    def _best_rates(self) -> dict[Profile, Floats]:
        """By the largest micro-batch of each kind."""
        found = {}
        for profile in set(self._problem.profiles):
            times = profile.seconds.table
            found[profile] = np.maximum.accumulate(np.arange(len(times)) / np.maximum(times, 1e-15))
        return found


def _seconds(priced: tuple[Priced, ...]) -> float:
    return priced[0].cost.step_s


def _without(members: Members, rank: int) -> Members:
    return tuple(each for each in members if each != rank)


def _with(members: Members, rank: int) -> Members:
    return tuple(sorted((*members, rank)))


def _pairs(ranks: range) -> Iterable[tuple[int, int]]:
    """All pairs of a few; of many those whose numbers are a power of two apart, which still join who is near."""
    if len(ranks) <= _EACH:
        return combinations(ranks, 2)
    reach = [1 << power for power in range(len(ranks).bit_length())]
    return [(rank, rank + more) for rank in ranks for more in reach if rank + more in ranks]


def _islands(members: Members, joined: Iterable[tuple[int, int]]) -> list[Members]:
    """The members that are joined, directly or through others."""
    island_of = {rank: [rank] for rank in members}
    for a, b in joined:
        if island_of[a] is not island_of[b]:
            small, large = sorted((island_of[a], island_of[b]), key=len)
            large += small
            island_of |= dict.fromkeys(small, large)
    return [tuple(sorted(each)) for each in {id(each): each for each in island_of.values()}.values()]
