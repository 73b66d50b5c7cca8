"""Replay of a schedule on a cluster: flow-level and event-driven, without a global barrier.

Each rank follows the wait rule on its own. It keeps a few of its reads in flight, taken in their order; a read is a
flow that shares every channel on its path max-min fairly, and its data arrive one path latency after they were sent.
Adding can be given a rate: it is then one more channel, which only adding moves of that rank cross.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from mimatrix.cluster.fabric import Fabric
from mimatrix.cluster.model import Cluster
from mimatrix.cluster.routes import Routes
from mimatrix.collectives.schedule import Schedule
from mimatrix.core.errors import UserError
from mimatrix.netsim.max_min_fairness import fair_rates
from mimatrix.netsim.timeline import Timeline
from mimatrix.netsim.traffic import Traffic

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_SLACK = 1e-12
"""Events closer together than this part of the time passed are one event: rounding must not split a lockstep."""

_EVENTS_BETWEEN_WATCHES = 500


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs besides the links: of a synchronisation, of adding, and the number of reads that a rank keeps in flight."""

    sync_s: float = 0.0
    add_bytes_per_s: float = np.inf
    in_flight: int = 8

    def __post_init__(self) -> None:
        if not 0 <= self.sync_s < np.inf:
            raise UserError(f"a synchronisation cannot cost {self.sync_s} s; use 0 or more, as 5us")
        if not self.add_bytes_per_s > 0:
            raise UserError(f"adding {self.add_bytes_per_s} bytes a second is too slow; use a rate above zero, as 10GB")
        if self.in_flight < 1:
            raise UserError(f"{self.in_flight} reads in flight move nothing; use 1 or more")


def replay(
    schedule: Schedule,
    cluster: Cluster,
    placement: Sequence[int] | None,
    message_bytes: float,
    *,
    costs: Costs = Costs(),  # noqa: B008 (a frozen value)
    routes: Routes | None = None,
    tolerance: float = 0.0,
) -> Timeline:
    """Replay `schedule` on `cluster` for a message of that size, rank i on device `placement[i]`."""
    return run(Traffic.of(schedule, Fabric(cluster), placement, routes), message_bytes, costs, tolerance=tolerance)


def run(
    traffic: Traffic,
    message_bytes: float,
    costs: Costs = Costs(),  # noqa: B008 (a frozen value)
    *,
    tolerance: float = 0.0,
    watch: Callable[[float], None] | None = None,
) -> Timeline:
    """Replay traffic that is laid out already, so that several sizes can share the laying out.

    With a `tolerance`, transfers with no more than that fraction of their bytes left end together with the next event:
    far fewer events on large networks with collisions, and times too short by about that fraction at most. `watch` is
    called from time to time with the fraction of the transfers that are done.
    """
    if not 0 < message_bytes < np.inf:
        raise UserError(f"a message of {message_bytes} bytes cannot be replayed; use 1 byte or more")
    if not 0 <= tolerance < 1:
        raise UserError(f"a tolerance of {tolerance} makes no sense; use 0 (exact) or a little more, as 0.01")
    simulation = _Simulation(traffic, message_bytes, costs, max(tolerance, _SLACK))
    simulation.run(watch or (lambda _: None))
    return simulation.timeline()


class _Flows:
    """The reads in flight: move number, bytes left, rate, path. Rates are computed again when the set has changed."""

    def __init__(self, paths: Ints, capacities: Floats) -> None:
        self._paths, self._capacities = paths, capacities
        self.move = np.empty(0, dtype=np.int64)
        self.left = np.empty(0)
        self.rate = np.empty(0)
        self.carried = np.zeros(len(capacities))
        self.busy_s = np.zeros(len(capacities))
        self._used: Floats = np.zeros(len(capacities))

    def next_end(self) -> float:
        """Return the seconds until the first flow ends at the present rates."""
        return float((self.left / self.rate).min(initial=np.inf))

    def over(self, slack_s: float, rests: Floats) -> NDArray[np.bool_]:
        """Return the flows that end now: those due within `slack_s`, and those with no more than their rest left."""
        with np.errstate(invalid="ignore"):
            rest = np.fmax(self.rate * slack_s, rests[self.move])
        return np.isinf(self.rate) | (self.left <= rest)

    def advance(self, seconds: float) -> None:
        if seconds > 0 and len(self.move):
            self.left -= self.rate * seconds
            self.carried += self._used * seconds
            self.busy_s[self._used > 0] += seconds

    def change(self, keep: NDArray[np.bool_], started: Ints, sizes: Floats) -> None:
        """End some flows and start others. Those that end count as fully carried, a tolerated rest included."""
        ended = self._paths[self.move[~keep]]
        rests = np.repeat(self.left[~keep], ended.shape[1])
        self.carried += np.bincount(ended.ravel(), rests, len(self._capacities))
        self.move = np.concatenate([self.move[keep], started])
        self.left = np.concatenate([self.left[keep], sizes])
        paths = self._paths[self.move]
        self.rate = fair_rates(paths, self._capacities)
        finite = np.where(np.isfinite(self.rate), self.rate, 0.0)
        weights = np.repeat(finite, paths.shape[1])
        self._used = np.bincount(paths.ravel(), weights, len(self._capacities)).astype(np.float64, copy=False)


class _Simulation:
    """The state of a replay.

    Each rank is waiting, about to start its round (`starts_at`), reading, or about to have the last of its data
    (`ends_at`); the two times are infinite otherwise.
    """

    def __init__(self, traffic: Traffic, message_bytes: float, costs: Costs, tolerance: float) -> None:
        self.traffic, self.costs = traffic, costs
        self.message_bytes = message_bytes
        self.size = traffic.fraction * message_bytes
        self.rest = self.size * tolerance
        self.flows = _Flows(*_with_adders(traffic, costs))
        ranks, rounds = traffic.ranks, traffic.rounds
        self.now = 0.0
        self.round = np.full(ranks, -1)
        self.starts_at = np.full(ranks, np.inf)
        self.ends_at = np.full(ranks, np.inf)
        self.last_arrival = np.zeros(ranks)
        self.queue = np.zeros(ranks, dtype=np.int64)
        self.queue_end = np.zeros(ranks, dtype=np.int64)
        self.in_flight = np.zeros(ranks, dtype=np.int64)
        self.needs = traffic.needs.reshape(ranks, rounds).copy()
        self.began = np.full((ranks, rounds), np.nan)
        self.finished = np.full((ranks, rounds), np.nan)
        self.move_began = np.full(len(self.size), np.nan)
        self.move_ended = np.full(len(self.size), np.nan)

    def run(self, watch: Callable[[float], None]) -> None:
        """Process events in order of time until every rank has finished its last round."""
        # No rank waits before the first round: the data of every rank are there.
        self._enter(np.arange(self.traffic.ranks))
        for event in count(1):
            due = min(self.starts_at.min(), self.ends_at.min())
            after = min(self.flows.next_end(), due - self.now)
            if not np.isfinite(after):
                break
            self.flows.advance(after)
            self.now += after
            self._turn()
            if event % _EVENTS_BETWEEN_WATCHES == 0:
                watch(1.0 - float(np.isnan(self.move_ended).mean()))
        assert (self.round == self.traffic.rounds).all(), "the replay stopped before every rank was done"

    def timeline(self) -> Timeline:
        channels = len(self.traffic.fabric.channels)
        return Timeline(
            self.traffic,
            self.message_bytes,
            float(np.nanmax(self.finished, initial=0.0)),
            self.began,
            self.finished,
            self.move_began,
            self.move_ended,
            self.flows.carried[:channels],
            self.flows.busy_s[:channels],
            float(self.flows.carried[channels + 1 :].max(initial=0.0) / self.costs.add_bytes_per_s),
        )

    def _turn(self) -> None:
        """Process all events that are due: flows end, ranks finish rounds and enter the next, reads start."""
        soon = self.now * (1 + _SLACK)
        over = self.flows.over(soon - self.now, self.rest)
        active = [self._end_flows(self.flows.move[over])]
        while True:
            done, begins = np.flatnonzero(self.ends_at <= soon), np.flatnonzero(self.starts_at <= soon)
            if not done.size and not begins.size:
                break
            self._finish(done)
            self._begin(begins)
            active.append(begins)
        started = self._start_reads(np.unique(np.concatenate(active)))
        if over.any() or started.size:
            self.flows.change(~over, started, self.size[started])

    def _end_flows(self, moves: Ints) -> Ints:
        """End these reads; return the ranks that may start another."""
        readers = self.traffic.dst[moves]
        self.move_ended[moves] = self.now
        np.maximum.at(self.last_arrival, readers, self.now + self.traffic.latency_s[moves])
        np.subtract.at(self.in_flight, readers, 1)
        readers = np.unique(readers)
        empty = readers[(self.in_flight[readers] == 0) & (self.queue[readers] == self.queue_end[readers])]
        self.ends_at[empty] = self.last_arrival[empty]
        return readers

    def _start_reads(self, ranks: Ints) -> Ints:
        """Fill each rank's window of reads in flight from its queue, in order."""
        started = [np.empty(0, dtype=np.int64)]
        while True:
            ranks = ranks[(self.queue[ranks] < self.queue_end[ranks]) & (self.in_flight[ranks] < self.costs.in_flight)]
            ranks = ranks[np.isinf(self.starts_at[ranks])]
            if not ranks.size:
                moves = np.concatenate(started)
                self.move_began[moves] = self.now
                return moves
            started.append(self.queue[ranks])
            self.queue[ranks] += 1
            self.in_flight[ranks] += 1

    def _finish(self, ranks: Ints) -> None:
        """End the rounds of these ranks; ranks that waited for nothing else enter the next."""
        rounds = self.traffic.rounds
        self.ends_at[ranks] = np.inf
        self.finished[ranks, self.round[ranks]] = self.now
        unfinished = ranks[self.round[ranks] + 1 < rounds]
        self.round[ranks[self.round[ranks] + 1 == rounds]] = rounds
        following = self.round[unfinished] + 1
        readers = _gather(self.traffic.readers, self.traffic.reader_end, unfinished * rounds + following)
        lengths = _lengths(self.traffic.reader_end, unfinished * rounds + following)
        waiting = np.concatenate([readers * rounds + np.repeat(following, lengths), unfinished * rounds + following])
        flat = self.needs.reshape(-1)
        np.subtract.at(flat, waiting, 1)
        freed = np.unique(waiting[flat[waiting] == 0])
        self._enter(freed // rounds)

    def _enter(self, ranks: Ints) -> None:
        """Enter the next round, which starts after a synchronisation; a rank that reads nothing does not wait."""
        self.round[ranks] += 1
        place = ranks * self.traffic.rounds + self.round[ranks]
        self.queue_end[ranks] = self.traffic.queue_end[place]
        self.queue[ranks] = self.queue_end[ranks] - _lengths(self.traffic.queue_end, place)
        waited = self.traffic.needs[place] > 1
        self.starts_at[ranks] = self.now + np.where(waited, self.costs.sync_s, 0.0)

    def _begin(self, ranks: Ints) -> None:
        """Begin the rounds of these ranks; a round with nothing to read ends at once."""
        self.began[ranks, self.round[ranks]] = self.now
        self.starts_at[ranks] = np.inf
        self.last_arrival[ranks] = self.now
        self.ends_at[ranks[self.queue[ranks] == self.queue_end[ranks]]] = self.now


def _with_adders(traffic: Traffic, costs: Costs) -> tuple[Ints, Floats]:
    """Return paths and capacities: of the fabric, the padding, and an adder for each rank if adding has a rate."""
    channels = len(traffic.fabric.channels)
    capacities = np.append(traffic.fabric.rates, np.inf)
    if np.isinf(costs.add_bytes_per_s):
        return traffic.path, capacities
    adder = np.where(traffic.adds, channels + 1 + traffic.dst, channels)
    return np.column_stack([traffic.path, adder]), np.append(capacities, np.full(traffic.ranks, costs.add_bytes_per_s))


def _lengths(ends: Ints, rows: Ints) -> Ints:
    """Return the lengths of rows of a compressed list whose rows end at `ends`."""
    return ends[rows] - np.where(rows > 0, ends[rows - 1], 0)


def _gather(values: Ints, ends: Ints, rows: Ints) -> Ints:
    """Return the values of several rows of a compressed list, one after the other."""
    lengths = _lengths(ends, rows)
    offsets = np.repeat(ends[rows] - np.cumsum(lengths), lengths)
    return values[offsets + np.arange(lengths.sum())]
