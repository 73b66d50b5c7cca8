"""A second simulator, slow and plain, written from the model alone: what the real one is held against.

No arrays and no shortcuts: at every moment each rank is asked what it does next, the rates are found by raising all
reads together, and the clock goes on to whatever happens first. Only the routes come from the real code.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mimatrix.cluster import Fabric, Routes
from mimatrix.cluster.routes import NO_CHANNEL, find_paths
from mimatrix.collectives import Move, Schedule
from mimatrix.netsim import Costs


@dataclass
class Outcome:
    """What happened: times by (rank, round), bytes and busy seconds by channel."""

    seconds: float = 0.0
    began_s: dict[tuple[int, int], float] = field(default_factory=dict)
    ended_s: dict[tuple[int, int], float] = field(default_factory=dict)
    channel_bytes: list[float] = field(default_factory=list)
    channel_busy_s: list[float] = field(default_factory=list)


@dataclass(eq=False)
class _Read:
    """One read under way or waiting for its turn."""

    path: list[int]
    left_bytes: float
    latency_s: float


@dataclass
class _Rank:
    """Where a rank stands: in which round, since when it may read there (None: it still waits for peers)."""

    number: int
    round: int = 0
    began_s: float | None = None
    queue: list[_Read] = field(default_factory=list)
    flying: list[_Read] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)


def simulate(
    schedule: Schedule,
    fabric: Fabric,
    placement: Sequence[int],
    message_bytes: float,
    costs: Costs,
    routes: Routes,
) -> Outcome:
    """Run `schedule` with rank r on device `placement[r]`."""
    world = _World(schedule, fabric, placement, message_bytes, costs, routes)
    while world.settle():
        world.advance()
    world.outcome.seconds = max(world.outcome.ended_s.values(), default=0.0)
    return world.outcome


def fill(paths: Sequence[Sequence[int]], capacity: dict[int, float]) -> list[float]:
    """Max-min fair rates: raise all together until a channel is full, freeze those that cross it, raise the rest."""
    rates = [0.0] * len(paths)
    room = dict(capacity)
    rising = set(range(len(paths)))
    while rising:
        users: dict[int, int] = {}
        for flow in rising:
            for channel in paths[flow]:
                users[channel] = users.get(channel, 0) + 1
        steps = {channel: max(room[channel], 0.0) / count for channel, count in users.items()}
        step = min(steps.values(), default=math.inf)
        for flow in rising:
            rates[flow] += step
        if math.isinf(step):
            break
        for channel, count in users.items():
            room[channel] -= step * count
        full = {channel for channel, needed in steps.items() if needed == step}
        rising = {flow for flow in rising if not full.intersection(paths[flow])}
    return rates


class _World:
    """The state of all ranks at the moment `now_s`."""

    def __init__(
        self,
        schedule: Schedule,
        fabric: Fabric,
        placement: Sequence[int],
        message_bytes: float,
        costs: Costs,
        routes: Routes,
    ) -> None:
        self.schedule = schedule
        self.fabric = fabric
        self.placement = placement
        self.message_bytes = message_bytes
        self.costs = costs
        self.routes = routes
        self.now_s = 0.0
        self.ranks = [_Rank(number) for number in range(schedule.ranks)]
        self.capacity = {index: channel.rate_bytes_per_s for index, channel in enumerate(fabric.channels)}
        if math.isfinite(costs.add_bytes_per_s):
            self.capacity |= {self._adder(rank): costs.add_bytes_per_s for rank in range(schedule.ranks)}
        self.outcome = Outcome(channel_bytes=[0.0] * len(fabric.channels), channel_busy_s=[0.0] * len(fabric.channels))

    def settle(self) -> bool:
        """Let every rank do all that it can do at this very moment; True while some rank is not done."""
        while sum(self._act(rank) for rank in self.ranks):
            pass
        return any(rank.round < len(self.schedule.rounds) for rank in self.ranks)

    def advance(self) -> None:
        """Go on to the next thing that happens: a rank begins, a transfer ends, or data arrive."""
        reads = [(rank, read) for rank in self.ranks for read in rank.flying]
        rates = fill([read.path for _, read in reads], self.capacity)
        ends_s = [self.now_s + read.left_bytes / rate for (_, read), rate in zip(reads, rates, strict=True)]
        begins_s = [rank.began_s for rank in self.ranks if rank.began_s is not None and rank.began_s > self.now_s]
        arrivals_s = [when for rank in self.ranks for when in rank.arrivals_s if when > self.now_s]
        then_s = min(ends_s + begins_s + arrivals_s)
        for channel in {channel for _, read in reads for channel in read.path}:
            if channel < len(self.fabric.channels):
                self.outcome.channel_busy_s[channel] += then_s - self.now_s
        for (rank, read), rate, end_s in zip(reads, rates, ends_s, strict=True):
            ended = end_s <= then_s
            self._carry(read, read.left_bytes if ended else rate * (then_s - self.now_s))
            if ended:
                rank.flying.remove(read)
                rank.arrivals_s.append(then_s + read.latency_s)
        self.now_s = then_s

    def _act(self, rank: _Rank) -> bool:
        """Do the next thing that this rank can do now, if any; return False when it can only wait."""
        if rank.round == len(self.schedule.rounds):
            return False
        if rank.began_s is None:
            return self._try_to_enter(rank)
        if rank.began_s > self.now_s:
            return False
        if rank.queue and len(rank.flying) < self.costs.in_flight:
            rank.flying.append(rank.queue.pop(0))
            return True
        if rank.queue or rank.flying or any(when > self.now_s for when in rank.arrivals_s):
            return False
        self.outcome.ended_s[rank.number, rank.round] = self.now_s
        rank.round, rank.began_s, rank.arrivals_s = rank.round + 1, None, []
        return True

    def _try_to_enter(self, rank: _Rank) -> bool:
        moves = [move for move in self.schedule.rounds[rank.round] if move.dst == rank.number]
        if rank.round > 0 and any((move.src, rank.round - 1) not in self.outcome.ended_s for move in moves):
            return False
        rank.began_s = self.now_s + (self.costs.sync_s if moves else 0.0)
        rank.queue = [self._read(move) for move in moves if self._fraction(move) > 0]
        self.outcome.began_s[rank.number, rank.round] = rank.began_s
        return True

    def _read(self, move: Move) -> _Read:
        ends = [np.array([self.placement[rank]], dtype=np.int64) for rank in (move.src, move.dst)]
        (row,) = find_paths(self.fabric, ends[0], ends[1], self.routes).tolist()
        path = [channel for channel in row if channel != NO_CHANNEL]
        latency_s = sum(self.fabric.channels[channel].latency_s for channel in path)
        if move.adds and math.isfinite(self.costs.add_bytes_per_s):
            path.append(self._adder(move.dst))
        return _Read(path, self._fraction(move) * self.message_bytes, latency_s)

    def _fraction(self, move: Move) -> float:
        return math.fsum(self.schedule.shares.fractions[block] for block in move.blocks)

    def _adder(self, rank: int) -> int:
        """Return the number of the private channel through which a rank adds."""
        return len(self.fabric.channels) + rank

    def _carry(self, read: _Read, amount_bytes: float) -> None:
        read.left_bytes -= amount_bytes
        for channel in read.path:
            if channel < len(self.fabric.channels):
                self.outcome.channel_bytes[channel] += amount_bytes
