"""Find the ranks that a job is faster without: tried one by one, and in sets that may slow it down together."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations

import numpy as np

from mimatrix.planner.memory_fit import find_shortage, ranks_with_room
from mimatrix.planner.model.problem import Priced, Problem
from mimatrix.planner.model.profile import Profile
from mimatrix.planner.pricing import price_members
from mimatrix.planner.search.cost_tables import Floats
from mimatrix.planner.search.limits import (
    EQUAL_GAIN,
    EXCLUSION_GAIN,
    MAX_EXCLUSION_RANKS,
    MAX_EXCLUSION_SETS,
    MAX_PAIRED_RANKS,
    MAX_READMISSIONS,
)

Members = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Ranks that are left out at once, and the plans before (none where nothing fitted) and after that."""

    ranks: Members
    before: tuple[Priced, ...]
    after: tuple[Priced, ...]


def find_exclusions(problem: Problem, priced: tuple[Priced, ...]) -> list[Exclusion]:
    """Return sets of ranks without which the step is shorter, one after the other. `priced` is of all ranks."""
    exclusions: list[Exclusion] = []
    members = tuple(range(len(problem.profiles)))
    search = _ExclusionSearch(problem)
    while len(members) > 1:
        after = search.find_better(members, priced)
        if not after:
            break
        kept = after[0].members
        exclusions.append(Exclusion(tuple(rank for rank in members if rank not in kept), priced, after))
        priced, members = after, kept
    return exclusions


class _ExclusionSearch:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def find_better(self, members: Members, priced: tuple[Priced, ...]) -> tuple[Priced, ...]:
        """Return the shortest plan with fewer members that gains enough; nothing if there is none."""
        below_s = priced[0].cost.step_s / (1 + EXCLUSION_GAIN) if priced else np.inf
        better: list[tuple[Priced, ...]] = []
        for rest in self._candidates(members):
            shortest_s = min(map(_step_s, better), default=np.inf)
            plan = self._price_below(rest, min(below_s, shortest_s * (1 + EQUAL_GAIN)), priced)
            if plan:
                better.append(plan)
        if not better:
            return ()
        shortest_s = min(map(_step_s, better))
        near = [plan for plan in better if _step_s(plan) <= shortest_s * (1 + EQUAL_GAIN)]
        return self._readmit(members, max(near, key=lambda plan: len(plan[0].members)))

    def _price_below(self, rest: Members, below_s: float, instead: tuple[Priced, ...] = ()) -> tuple[Priced, ...]:
        """Return the plan of `rest` if it takes less than `below_s`; none if it surely gains nothing over `instead`."""
        # If each computes at its best all the time, and moves what two of them would pay: mostly too long already.
        paid_s = max((paid for pair, paid in self._pair_costs.items() if set(pair) <= set(rest)), default=0.0)
        rates = self._rates(below_s)
        if self._problem.global_batch >= (below_s - paid_s) * sum(rates[rank] for rank in rest):
            return ()
        if self._cannot_gain(rest, instead):
            return ()
        priced = price_members(self._problem, rest, below_s)
        return priced if priced and _step_s(priced) < below_s else ()

    def _cannot_gain(self, rest: Members, priced: tuple[Priced, ...]) -> bool:
        """Tell whether `rest` alone surely gain nothing: the others could stay with no samples and no share.

        They could unless they make communication longer, or a stage too large, or the optimizer's step in stage 0,
        where each rank does all of it.
        """
        unfit = set(self._problem.stages) - {each.stage for each in priced}
        if not priced or not all(self._lacks_memory(stage, rest) for stage in unfit):
            return False
        communication = self._problem.communication
        before, after = communication.cost(priced[0].members), communication.cost(rest)
        costs = zip((*before.once_s, *before.round_s), (*after.once_s, *after.round_s), strict=True)
        stepping = [self._problem.profiles[rank].optimizer_s for rank in priced[0].members]
        slowest_s = max(self._problem.profiles[rank].optimizer_s for rank in rest)
        return all(now_s <= then_s for now_s, then_s in costs) and (
            0 not in self._problem.stages or max(stepping) <= slowest_s
        )

    def _lacks_memory(self, stage: int, members: Members) -> bool:
        profiles = [self._problem.profiles[rank] for rank in members]
        return find_shortage(stage, self._problem.model, profiles) is not None

    def _readmit(self, members: Members, best: tuple[Priced, ...]) -> tuple[Priced, ...]:
        """Return the plan with those ranks again that were in the excluded set but do no harm."""
        limit_s = np.nextafter(_step_s(best) * (1 + EXCLUSION_GAIN), np.inf)
        for _ in range(MAX_READMISSIONS):
            kept = best[0].members
            missing = [rank for rank in members if rank not in kept]
            if len(missing) < 2:
                break
            tries = [self._price_below(rest, limit_s) for rest in self._once_per_kind(missing, partial(_with, kept))]
            if not any(tries):
                break
            best = min(filter(None, tries), key=_step_s)
        return best

    def _candidates(self, members: Members) -> list[Members]:
        """Return the sets of ranks that may be kept, each once, the most promising first."""
        sets: dict[Members, None] = {}
        if len(members) <= MAX_EXCLUSION_RANKS:
            sets |= dict.fromkeys(self._by_proximity(members))
        for stage in self._problem.stages:
            sets[ranks_with_room(self._problem.model, stage, self._problem.profiles, members)] = None
        if len(members) <= MAX_EXCLUSION_RANKS:
            sets |= dict.fromkeys((*self._by_rank_order(members), *self._by_kind(members)))
            rates = self._rates(np.inf)
            few = len(members) <= MAX_PAIRED_RANKS
            slowest = members if few else sorted(members, key=lambda rank: rates[rank])[:MAX_PAIRED_RANKS]
            sets |= dict.fromkeys(self._once_per_kind(slowest, partial(_without, members)))
        return [rest for rest in sets if 0 < len(rest) < len(members)]

    def _once_per_kind(self, ranks: Iterable[int], change: Callable[[int], Members]) -> list[Members]:
        """Apply `change` to each rank, once for those that are alike as devices and in what their pairs pay."""
        changed = {
            (self._problem.profiles[rank], self._link_costs[rank]): change(rank) for rank in sorted(ranks, reverse=True)
        }
        return list(changed.values())

    def _by_rank_order(self, members: Members) -> Iterator[Members]:
        """Yield the fastest ranks, those with most room, those with the fastest optimizer: a growing number of each."""
        profiles = self._problem.profiles
        for worth in (
            self._rates(np.inf),
            [float(profile.room_bytes) for profile in profiles],
            [-profile.optimizer_s for profile in profiles],
        ):
            steps = sorted({worth[rank] for rank in members})[1:]
            for least in steps[:: -(-len(steps) // MAX_EXCLUSION_SETS) or 1]:
                yield tuple(rank for rank in members if worth[rank] >= least)

    def _by_kind(self, members: Members) -> Iterator[Members]:
        """Yield the ranks of each kind of device, and all others."""
        kinds: dict[str, list[int]] = {}
        for rank in members:
            kinds.setdefault(self._problem.profiles[rank].device, []).append(rank)
        for ranks in list(kinds.values())[:MAX_EXCLUSION_SETS]:
            yield tuple(ranks)
            yield tuple(rank for rank in members if rank not in ranks)

    def _by_proximity(self, members: Members) -> Iterator[Members]:
        """Yield ranks that are near to one another on the network: connected by pairs that pay no more than a limit."""
        paid = {pair: paid_s for pair, paid_s in self._pair_costs.items() if set(pair) <= set(members)}
        limits = sorted(set(paid.values()), reverse=True)[1:]
        for limit_s in limits[:: -(-len(limits) // MAX_EXCLUSION_SETS) or 1]:
            islands = _connected(members, [pair for pair, paid_s in paid.items() if paid_s <= limit_s])
            yield from sorted(islands, key=len, reverse=True)[:2]

    @cached_property
    def _pair_costs(self) -> dict[tuple[int, int], float]:
        """What pairs of ranks would pay at least for a step, in the stages that may be chosen."""
        ranks = len(self._problem.profiles)
        if ranks > MAX_EXCLUSION_RANKS:
            return {}
        stages = self._problem.stages
        paid = {pair: self._problem.communication.cost(pair) for pair in _pairs(range(ranks))}
        return {pair: min(cost.once_s[stage] + cost.round_s[stage] for stage in stages) for pair, cost in paid.items()}

    @cached_property
    def _link_costs(self) -> list[tuple[float, ...]]:
        """What each rank pays in pairs; with many ranks the least of it, since not all pairs are asked."""
        paid: list[list[float]] = [[] for _ in self._problem.profiles]
        for pair, paid_s in self._pair_costs.items():
            for rank in pair:
                paid[rank].append(float(f"{paid_s:.6g}"))
        few = len(paid) <= MAX_PAIRED_RANKS
        return [tuple(sorted(costs)[: None if few else 1]) for costs in paid]

    def _rates(self, limit_s: float) -> list[float]:
        """Return the most samples per second of each rank, with micro-batches that take no longer than the limit."""
        rate_of = {
            profile: float(rates[np.searchsorted(profile.seconds.table, limit_s, side="right") - 1])
            for profile, rates in self._best_rates.items()
        }
        return [rate_of[profile] for profile in self._problem.profiles]

    @cached_property
    def _best_rates(self) -> dict[Profile, Floats]:
        """The most samples per second of each kind, by its largest micro-batch."""
        rates = {}
        for profile in set(self._problem.profiles):
            times = profile.seconds.table
            rates[profile] = np.maximum.accumulate(np.arange(len(times)) / np.maximum(times, 1e-15))
        return rates


def _step_s(priced: tuple[Priced, ...]) -> float:
    return priced[0].cost.step_s


def _without(members: Members, rank: int) -> Members:
    return tuple(each for each in members if each != rank)


def _with(members: Members, rank: int) -> Members:
    return tuple(sorted((*members, rank)))


def _pairs(ranks: range) -> Iterable[tuple[int, int]]:
    """Return all pairs of a few ranks; of many, those whose numbers are a power of two apart, which connect all."""
    if len(ranks) <= MAX_PAIRED_RANKS:
        return combinations(ranks, 2)
    reach = [1 << power for power in range(len(ranks).bit_length())]
    return [(rank, rank + distance) for rank in ranks for distance in reach if rank + distance in ranks]


def _connected(members: Members, pairs: Iterable[tuple[int, int]]) -> list[Members]:
    """Return the connected components of the members."""
    component_of = {rank: [rank] for rank in members}
    for a, b in pairs:
        if component_of[a] is not component_of[b]:
            small, large = sorted((component_of[a], component_of[b]), key=len)
            large += small
            component_of |= dict.fromkeys(small, large)
    components = {id(component): component for component in component_of.values()}
    return [tuple(sorted(component)) for component in components.values()]
