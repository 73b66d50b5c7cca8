"""Replay a trace through the scheduler's own function: how long jobs would have waited under which policy."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

from mimatrix.core.errors import UserError
from mimatrix.scheduler.fairshare import decay_and_add
from mimatrix.scheduler.scheduler import decide
from mimatrix.scheduler.simulation.trace import Arrival, Trace
from mimatrix.scheduler.state import DeviceSlot, Policy, Preempt, Queued, Running, Start, State, Stop

POLICIES = {
    "in order": Policy(backfill=False, preempts=False, ageing_s=None, fairshare_weight=0.0),
    "backfill": Policy(preempts=False, ageing_s=None, fairshare_weight=0.0),
    "backfill, ageing, fair shares": Policy(preempts=False),
    "all, with preemption": Policy(),
}
SAVING_S = 30.0
"""Between telling a job to stop and its devices being free."""
_ROUNDING_S, _NEARLY_NOTHING_S = 1e-9, 1e-6


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """What became of one job."""

    job: str
    user: str
    at_s: float
    started_s: float
    """When it was started for the first time."""
    ended_s: float
    preempted: int
    reached_limit: bool
    """Whether its time limit ended it."""

    @property
    def waited_s(self) -> float:
        """Return the time until it started for the first time."""
        return self.started_s - self.at_s


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay gave."""

    jobs: tuple[JobOutcome, ...]
    never: tuple[str, ...]
    """Jobs for which there are not enough devices."""
    device_seconds: float
    busy_seconds: float
    decisions: int

    @property
    def utilisation(self) -> float:
        """Return the share of all devices' time in which a job had them, from the first arrival to the last end."""
        return self.busy_seconds / self.device_seconds if self.device_seconds else 0.0

    def waited_s(self, part: float) -> float:
        """Return the waiting time that this share of the jobs did not exceed."""
        waits = sorted(outcome.waited_s for outcome in self.jobs)
        return waits[min(len(waits) - 1, int(part * len(waits)))] if waits else 0.0

    @property
    def mean_waited_s(self) -> float:
        """Return the mean over all jobs that started."""
        return sum(outcome.waited_s for outcome in self.jobs) / len(self.jobs) if self.jobs else 0.0


def replay(trace: Trace, policy: Policy, say: Callable[[float], None] = lambda _: None) -> ReplayResult:
    """Run from the first arrival until all is done; `say` is called with the share that is.

    Raises:
        UserError: The trace has no devices.
    """
    if not trace.devices:
        raise UserError("the trace has no devices; add some, or nothing can start")
    return _Replay(trace, policy, say).run()


@dataclass
class _Job:
    number: int
    arrival: Arrival
    work_s: float
    """What is left, in seconds of a device of speed 1."""
    running: Running | None = None
    started_s: float | None = None
    preempted: int = 0
    generation: int = 0
    """Rises with each start, so that ends of an earlier one are known as such."""

    @property
    def queued(self) -> Queued:
        given = self.arrival
        return Queued(self.number, given.request, given.user, given.priority, given.at_s, given.max_time_s)

    def outcome(self, now_s: float) -> JobOutcome:
        assert self.started_s is not None
        given = self.arrival
        is_cut_short = self.work_s > _NEARLY_NOTHING_S
        return JobOutcome(given.job, given.user, given.at_s, self.started_s, now_s, self.preempted, is_cut_short)


class _Replay:
    """Jobs have numbers in the order of their names, by which the scheduler breaks ties."""

    def __init__(self, trace: Trace, policy: Policy, say: Callable[[float], None]) -> None:
        self._trace, self._policy, self._say = trace, policy, say
        self._now_s = 0.0
        numbers = {name: number for number, name in enumerate(sorted(each.job for each in trace.arrivals))}
        self._jobs = {numbers[each.job]: _Job(numbers[each.job], each, self._work_of(each)) for each in trace.arrivals}
        self._waiting: dict[int, _Job] = {}
        self._active: dict[int, _Job] = {}
        self._done: list[JobOutcome] = []
        self._used: dict[str, float] = {}
        self._busy_s = 0.0
        self._decisions = 0
        self._order = count()
        self._events = [(each.at_s, next(self._order), numbers[each.job], 0) for each in trace.arrivals]

    def _work_of(self, arrival: Arrival) -> float:
        return arrival.work_s * arrival.request.within(len(self._trace.devices)).least

    def run(self) -> ReplayResult:
        self._now_s = began_s = self._trace.arrivals[0].at_s if self._trace.arrivals else 0.0
        while self._events:
            at_s, _, number, generation = heapq.heappop(self._events)
            self._pass(at_s)
            if generation == 0:
                self._waiting[number] = self._jobs[number]
            else:
                self._end(self._jobs[number], generation)
            if not self._events or self._events[0][0] > self._now_s:
                self._decide()
                self._say(len(self._done) / max(1, len(self._jobs)))
        device_s = len(self._trace.devices) * (self._now_s - began_s)
        done = tuple(sorted(self._done, key=lambda outcome: (outcome.at_s, outcome.job)))
        never = tuple(sorted(job.arrival.job for job in self._waiting.values()))
        return ReplayResult(done, never, device_s, self._busy_s, self._decisions)

    def _pass(self, at_s: float) -> None:
        seconds = at_s - self._now_s
        running = [job.running for job in self._active.values() if job.running]
        self._busy_s += seconds * sum(len(each.devices) for each in running)
        self._used = decay_and_add(self._used, running, seconds)
        for job in self._active.values():
            assert job.running
            if not job.running.is_leaving:
                job.work_s -= seconds * sum(device.speed for device in job.running.devices)
        self._now_s = at_s

    def _decide(self) -> None:
        state = State(
            self._trace.devices,
            tuple(job.queued for job in self._waiting.values()),
            tuple(job.running for job in self._active.values() if job.running),
            self._used,
        )
        for decision in decide(state, self._now_s, self._policy):
            self._decisions += 1
            match decision:
                case Start(number, devices):
                    self._start(self._waiting.pop(number), devices)
                case Preempt(number):
                    self._stop(self._jobs[number], self._now_s + SAVING_S)
                case Stop(number):
                    self._stop(self._jobs[number], self._now_s)

    def _start(self, job: _Job, devices: tuple[DeviceSlot, ...]) -> None:
        given = job.arrival
        job.running = Running(
            job.number, devices, given.user, given.priority, self._now_s, given.max_time_s, given.preemptible
        )
        job.started_s = self._now_s if job.started_s is None else job.started_s
        job.generation += 1
        self._active[job.number] = job
        lasts_s = max(0.0, job.work_s) / sum(device.speed for device in devices)
        self._push(self._now_s + min(lasts_s, given.max_time_s or lasts_s), job)

    def _stop(self, job: _Job, at_s: float) -> None:
        assert job.running
        job.running = replace(job.running, is_leaving=True)
        job.generation += 1
        self._push(at_s, job)

    def _push(self, at_s: float, job: _Job) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), job.number, job.generation))

    def _end(self, job: _Job, generation: int) -> None:
        if generation != job.generation or job.running is None:
            return
        limit_s, running = job.arrival.max_time_s, job.running
        is_over = limit_s is not None and self._now_s >= running.started_s + limit_s - _ROUNDING_S
        job.running = None
        del self._active[job.number]
        if running.is_leaving and not is_over and job.work_s > _ROUNDING_S:
            job.preempted += 1
            self._waiting[job.number] = job
        else:
            self._done.append(job.outcome(self._now_s))
