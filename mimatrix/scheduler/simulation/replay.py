"""A trace replayed through the scheduler's own function: who would have waited for how long under which policy."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

from mimatrix.core.errors import UserError
from mimatrix.scheduler.fairshare import later
from mimatrix.scheduler.scheduler import decide
from mimatrix.scheduler.simulation.trace import Arrival, Trace
from mimatrix.scheduler.state import End, Policy, Preempt, Queued, Running, Seat, Start, State

POLICIES = {
    "in order": Policy(backfill=False, preempts=False, ageing_s=None, fair=0.0),
    "backfill": Policy(preempts=False, ageing_s=None, fair=0.0),
    "backfill, ageing, fair shares": Policy(preempts=False),
    "all, with preemption": Policy(),
}
SAVING_S = 30.0
"""From when a job is told to go until its devices are free."""


@dataclass(frozen=True, slots=True)
class Stay:
    """What became of one job."""

    job: str
    user: str
    at_s: float
    started_s: float
    """For the first time."""
    ended_s: float
    preempted: int
    was_ended: bool
    """By its time limit."""

    @property
    def waited_s(self) -> float:
        """Until it started for the first time."""
        return self.started_s - self.at_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """A whole replay."""

    stays: tuple[Stay, ...]
    never: tuple[str, ...]
    """Jobs for which there are not enough devices."""
    seat_seconds: float
    busy_seconds: float
    decisions: int

    @property
    def utilisation(self) -> float:
        """The part of all devices' time in which a job had them, from the first arrival to the last end."""
        return self.busy_seconds / self.seat_seconds if self.seat_seconds else 0.0

    def waited_s(self, part: float) -> float:
        """Such a part of the jobs waited no longer."""
        waits = sorted(stay.waited_s for stay in self.stays)
        return waits[min(len(waits) - 1, int(part * len(waits)))] if waits else 0.0

    @property
    def mean_waited_s(self) -> float:
        """Over all jobs that started."""
        return sum(stay.waited_s for stay in self.stays) / len(self.stays) if self.stays else 0.0


def replay(trace: Trace, policy: Policy, say: Callable[[float], None] = lambda _: None) -> Outcome:
    """From the first arrival until all is done; `say` hears how much is."""
    if not trace.seats:
        raise UserError("the trace has no devices; add some, or nothing can start")
    return _Replay(trace, policy, say).outcome()


@dataclass
class _Job:
    arrival: Arrival
    work_s: float
    """That is left, in seconds of a device of speed 1."""
    running: Running | None = None
    started_s: float | None = None
    preempted: int = 0
    turn: int = 0
    """Rises with each start, so that ends of an earlier one are known as such."""

    @property
    def queued(self) -> Queued:
        each = self.arrival
        return Queued(each.job, each.wish, each.user, each.priority, each.at_s, each.max_time_s)


@dataclass
class _Replay:
    trace: Trace
    policy: Policy
    say: Callable[[float], None]
    now_s: float = 0.0
    jobs: dict[str, _Job] = field(default_factory=dict)
    waiting: dict[str, _Job] = field(default_factory=dict)
    active: dict[str, _Job] = field(default_factory=dict)
    stays: list[Stay] = field(default_factory=list)
    used: dict[str, float] = field(default_factory=dict)
    busy_s: float = 0.0
    decisions: int = 0

    def outcome(self) -> Outcome:
        order = count()
        self.events: list[tuple[float, int, str, int]] = [
            (each.at_s, next(order), each.job, 0) for each in self.trace.arrivals
        ]
        self.order = order
        self.now_s = began_s = self.trace.arrivals[0].at_s if self.trace.arrivals else 0.0
        arrivals = {each.job: each for each in self.trace.arrivals}
        while self.events:
            at_s, _, name, turn = heapq.heappop(self.events)
            self._pass(at_s)
            if turn == 0:
                job = self.jobs[name] = _Job(
                    arrivals[name], arrivals[name].work_s * arrivals[name].wish.within(len(self.trace.seats)).least
                )
                self.waiting[name] = job
            else:
                self._ended(self.jobs[name], turn)
            if not self.events or self.events[0][0] > self.now_s:
                self._decide()
                self.say(len(self.stays) / max(1, len(arrivals)))
        seat_s = len(self.trace.seats) * (self.now_s - began_s)
        stays = tuple(sorted(self.stays, key=lambda stay: (stay.at_s, stay.job)))
        return Outcome(stays, tuple(sorted(self.waiting)), seat_s, self.busy_s, self.decisions)

    def _pass(self, at_s: float) -> None:
        seconds = at_s - self.now_s
        running = [job.running for job in self.active.values() if job.running]
        self.busy_s += seconds * sum(len(each.seats) for each in running)
        self.used = later(self.used, running, seconds)
        for job in self.active.values():
            assert job.running
            if not job.running.is_leaving:
                job.work_s -= seconds * sum(seat.speed for seat in job.running.seats)
        self.now_s = at_s

    def _decide(self) -> None:
        state = State(
            self.trace.seats,
            tuple(job.queued for job in self.waiting.values()),
            tuple(job.running for job in self.active.values() if job.running),
            self.used,
        )
        for decision in decide(state, self.now_s, self.policy):
            self.decisions += 1
            match decision:
                case Start(name, seats):
                    self._start(self.waiting.pop(name), seats)
                case Preempt(name):
                    self._leave(self.jobs[name], self.now_s + SAVING_S)
                case End(name):
                    self._leave(self.jobs[name], self.now_s)

    def _start(self, job: _Job, seats: tuple[Seat, ...]) -> None:
        each = job.arrival
        job.running = Running(
            each.job,
            seats,
            each.user,
            each.priority,
            self.now_s,
            each.max_time_s,
            each.preemptible,
        )
        job.started_s = self.now_s if job.started_s is None else job.started_s
        job.turn += 1
        self.active[each.job] = job
        lasts = max(0.0, job.work_s) / sum(seat.speed for seat in job.running.seats)
        self._at(self.now_s + min(lasts, each.max_time_s or lasts), job)

    def _leave(self, job: _Job, at_s: float) -> None:
        assert job.running
        job.running = replace(job.running, is_leaving=True)
        job.turn += 1
        self._at(at_s, job)

    def _at(self, at_s: float, job: _Job) -> None:
        heapq.heappush(self.events, (at_s, next(self.order), job.arrival.job, job.turn))

    def _ended(self, job: _Job, turn: int) -> None:
        if turn != job.turn or job.running is None:
            return
        limit = job.arrival.max_time_s
        is_over = limit is not None and self.now_s >= job.running.started_s + limit - 1e-9
        leaves = job.running.is_leaving
        job.running = None
        del self.active[job.arrival.job]
        if leaves and not is_over and job.work_s > 1e-9:
            job.preempted += 1
            self.waiting[job.arrival.job] = job
            return
        assert job.started_s is not None
        each = job.arrival
        self.stays.append(
            Stay(each.job, each.user, each.at_s, job.started_s, self.now_s, job.preempted, job.work_s > 1e-6)
        )
