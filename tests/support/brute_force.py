"""Plans by trying everything: slow, plain, and without a line of the planner's. Curves are read as lists of values."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

GRID = 6


@dataclass(frozen=True)
class PricedRank:
    """A device as plain numbers; lists begin with 0 samples."""

    seconds: tuple[float, ...]
    memory: tuple[float, ...]
    room: int
    optimizer_s: float
    handling_s: tuple[float, ...]


@dataclass(frozen=True)
class PlanningCase:
    """A whole problem as plain numbers."""

    global_batch: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    unit_bytes: int
    ranks: tuple[PricedRank, ...]
    once_s: tuple[float, ...]
    round_s: tuple[float, ...]
    equal_counts: bool

    def held_bytes(self, stage: int) -> tuple[int, int]:
        """Return what each rank has whatever it owns, and what is divided by shares."""
        p, g, o, u = self.parameter_bytes, self.gradient_bytes, self.optimizer_bytes, self.unit_bytes
        return [(p + g + o, 0), (p + g, o), (p + 3 * u, g + o), (6 * u, p + g + o)][stage]

    def room_for(self, stage: int, rank: PricedRank, size: int) -> float:
        """Return the share that a rank can own besides a micro-batch; negative if not even that micro-batch fits."""
        whole, cut = self.held_bytes(stage)
        free = rank.room - whole - rank.memory[size]
        if free < 0:
            return -1.0
        return min(1.0, free / cut) if cut else 1.0


def shortest(case: PlanningCase, stage: int) -> float:
    """Return the shortest step of a stage over all batches, all cuts into micro-batches and all shares."""
    return min((_with_caps(case, stage, caps) for caps in _all_caps(case)), default=float("inf"))


def shortest_on_grid(case: PlanningCase, stage: int) -> float:
    """Return the shortest step of a stage with shares of whole sixths only."""
    best = float("inf")
    for shares in _grid(len(case.ranks)):
        caps = []
        for rank, share in zip(case.ranks, shares, strict=True):
            fits = [size for size in range(len(rank.seconds)) if case.room_for(stage, rank, size) >= share - 1e-12]
            caps.append(max(fits, default=-1))
        if min(caps) >= 0:
            best = min(best, _step(case, stage, caps, shares))
    return best


def price(case: PlanningCase, stage: int, micro: Sequence[Sequence[int]], shares: Sequence[float]) -> float:
    """Return the time that a given plan takes, infinite if a rank runs out of memory."""
    whole, cut = case.held_bytes(stage)
    for sizes, share, rank in zip(micro, shares, case.ranks, strict=True):
        if whole + share * cut + rank.memory[max(sizes, default=0)] > rank.room + 1:
            return float("inf")
    times = [[_time(rank, stage, size) for size in sizes] for sizes, rank in zip(micro, case.ranks, strict=True)]
    stepping = [rank.optimizer_s * (share if stage else 1) for share, rank in zip(shares, case.ranks, strict=True)]
    total = case.once_s[stage]
    if stage < 2 and not case.equal_counts:
        if stage == 0:
            return total + max(sum(each) + step for each, step in zip(times, stepping, strict=True))
        return total + max(map(sum, times)) + max(stepping)
    for turn in range(max(map(len, times))):
        total += max(each[turn] for each in times if turn < len(each)) + case.round_s[stage]
    return total + max(stepping)


def random_case(seed: int) -> PlanningCase:
    """Two or three devices whose curves have a fixed part and a knee; memory is short in most."""
    draw = random.Random(seed)
    count = draw.choice((2, 2, 3))
    unit = draw.choice((0, 2_000_000))
    sizes = [draw.randint(10, 60) * 1_000_000 for _ in range(3)]
    ranks = tuple(_random_rank(draw, sum(sizes)) for _ in range(count))
    if draw.random() < 0.5:
        # Everything fits, though not much beside it.
        ranks = tuple(replace(rank, room=max(rank.room, round(draw.uniform(1.0, 2.0) * sum(sizes)))) for rank in ranks)
    if draw.random() < 0.25:
        ranks = (*ranks[:-1], ranks[0])
    fast = draw.choice((0.0, 0.0005, 0.005, 0.03))
    once = tuple(fast * draw.uniform(0.5, 2) for _ in range(4))
    per_round = (0.0, 0.0, fast * draw.random(), fast * draw.uniform(0.5, 2))
    batch = draw.randint(1, 7)
    return PlanningCase(batch, sizes[0], sizes[1], sizes[2], unit, ranks, once, per_round, draw.random() < 0.15)


def _random_rank(draw: random.Random, states: int) -> PricedRank:
    most = draw.randint(1, 4)
    slope = draw.choice((0.001, 0.004, 0.01)) * draw.uniform(0.5, 2)
    fixed = slope * draw.choice((0.0, 0.5, 1.0, 3.0)) * draw.uniform(0.7, 1.3)
    knee = draw.randint(1, 4)
    steep = slope * draw.choice((1.0, 1.5, 4.0))
    seconds = [0.0]
    for size in range(1, most + 1):
        seconds.append(max(seconds[-1], fixed + slope * min(size, knee) + steep * max(0, size - knee)))
    per_sample = draw.randint(1, 30) * 1_000_000
    memory = [0.0, *(draw.randint(0, 5) * 1_000_000 + per_sample * size for size in range(1, most + 1))]
    memory = [max(memory[: size + 1]) for size in range(most + 1)]
    room = round(draw.choice((0.2, 0.4, 0.6, 0.8, 1.0, 1.3, 2.0, 3.0)) * draw.uniform(0.8, 1.2) * states)
    optimizer = slope * draw.choice((0.01, 0.5, 2.0)) * draw.uniform(0.5, 2)
    handling = tuple(sorted(slope * draw.choice((0.0, 0.2)) * draw.random() for _ in range(4)))
    return PricedRank(tuple(seconds), tuple(memory), room, optimizer, handling)


def _all_caps(case: PlanningCase) -> Iterator[tuple[int, ...]]:
    return product(*(range(len(rank.seconds)) for rank in case.ranks))


def _grid(count: int) -> Iterator[tuple[float, ...]]:
    for parts in product(range(GRID + 1), repeat=count):
        if sum(parts) == GRID:
            yield tuple(part / GRID for part in parts)


def _with_caps(case: PlanningCase, stage: int, caps: tuple[int, ...]) -> float:
    """With the best shares beside micro-batches of `caps`, found by halving the time that stepping may take."""
    room = [case.room_for(stage, rank, cap) for rank, cap in zip(case.ranks, caps, strict=True)]
    if min(room) < 0 or sum(room) < 1 - 1e-12:
        return float("inf")
    low, high = 0.0, sum(rank.optimizer_s for rank in case.ranks)
    for _ in range(60):
        middle = (low + high) / 2
        owned = [min(most, middle / rank.optimizer_s) for most, rank in zip(room, case.ranks, strict=True)]
        low, high = (low, middle) if sum(owned) >= 1 else (middle, high)
    shares = [min(most, high / rank.optimizer_s) for most, rank in zip(room, case.ranks, strict=True)]
    return _step(case, stage, caps, shares)


def _step(case: PlanningCase, stage: int, caps: Sequence[int], shares: Sequence[float]) -> float:
    stepping = [rank.optimizer_s * (share if stage else 1) for share, rank in zip(shares, case.ranks, strict=True)]
    if stage >= 2 or case.equal_counts:
        return _in_rounds(case, stage, tuple(caps)) + max(stepping) + case.once_s[stage]
    best = float("inf")
    for batches in product(range(case.global_batch + 1), repeat=len(caps)):
        if sum(batches) == case.global_batch:
            times = [_cut(rank, stage, cap, batch) for rank, cap, batch in zip(case.ranks, caps, batches, strict=True)]
            if stage == 0:
                best = min(best, max(time + step for time, step in zip(times, stepping, strict=True)))
            else:
                best = min(best, max(times) + max(stepping))
    return best + case.once_s[stage]


@cache
def _cut(rank: PricedRank, stage: int, cap: int, batch: int) -> float:
    """Return the shortest of all ways to cut a batch into micro-batches."""
    if not batch:
        return 0.0
    ways = (_time(rank, stage, size) + _cut(rank, stage, cap, batch - size) for size in range(1, min(cap, batch) + 1))
    return min(ways, default=float("inf"))


@cache
def _in_rounds(case: PlanningCase, stage: int, caps: tuple[int, ...]) -> float:
    """Return the shortest of all sequences of rounds.

    In any order: sorting each rank's micro-batches, the larger ones first, makes no round longer.
    """
    rounds: dict[int, float] = {}
    for sizes in product(*(range(cap + 1) for cap in caps)):
        longest = max(_time(rank, stage, size) for rank, size in zip(case.ranks, sizes, strict=True))
        rounds[sum(sizes)] = min(rounds.get(sum(sizes), float("inf")), longest)
    paid = case.round_s[stage]
    best = [0.0]
    for left in range(1, case.global_batch + 1):
        ways = (rounds[size] + paid + best[left - size] for size in range(1, left + 1) if size in rounds)
        best.append(min(ways, default=float("inf")))
    return best[-1]


def _time(rank: PricedRank, stage: int, size: int) -> float:
    return rank.seconds[size] + rank.handling_s[stage] if size else 0.0
