"""Decide which jobs start, wait and stop: a pure function of state and time. Every decision has its reason.

Jobs are taken in the order of their effective priority: priority, plus what waiting adds, minus what their users had
recently. The first that cannot start is the *head*: the devices that it will get are kept for it, and jobs behind it
may have them only as long as it has to wait anyway. A job may have running ones of lower priority save and stop.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from mimatrix.scheduler.needs import Needs, counts_of, needs_of
from mimatrix.scheduler.placement import FreeDevices, SpeedOf, chosen_of
from mimatrix.scheduler.reasons import StartKind, StartReason, StopKind, StopReason, WaitKind, WaitReason
from mimatrix.scheduler.state import Decision, DeviceSlot, Policy, Preempt, Queued, Running, Start, State, Stop, Wait


def decide(state: State, now_s: float, policy: Policy = Policy()) -> tuple[Decision, ...]:
    """Return what to do now. The same state and time give the same decisions."""
    return tuple(_SchedulingPass(state, now_s, policy).decisions())


def effective_priorities(state: State, now_s: float, policy: Policy) -> dict[int, float]:
    """Return what decides the order of queued jobs: the larger comes first."""
    users = {*state.used, *(each.user for each in state.queued), *(each.user for each in state.running)}
    total = sum(state.used.values())
    over = {user: state.used.get(user, 0.0) / total - 1 / len(users) if total else 0.0 for user in users}
    ageing = 1 / policy.ageing_s if policy.ageing_s else 0.0
    return {
        job.job: job.priority + ageing * max(0.0, now_s - job.since_s) - policy.fairshare_weight * over[job.user]
        for job in state.queued
    }


@dataclass(frozen=True, slots=True)
class Reservation:
    """Devices that are kept for a job, and when it can have all of them at the latest."""

    job: int
    devices: frozenset[DeviceSlot]
    at_s: float
    after: int | None
    """The job that ends last before it; None if it need not wait."""


def reservation(job: Queued, state: State, now_s: float, policy: Policy = Policy()) -> Reservation | None:
    """Return the devices that a job would get first if no other job started, and when; None if it can never start."""
    found = _SchedulingPass(state, now_s, policy)
    return found.reserved(job, found.needs(job))


class _SchedulingPass:
    """One pass over the queue: what is free, and for which jobs."""

    def __init__(self, state: State, now_s: float, policy: Policy) -> None:
        self._state, self._now_s, self._policy = state, now_s, policy
        self._kinds = tuple(sorted({device.kind for device in state.devices}))
        self._there = Counter(device.kind for device in state.devices)
        self._default = {device.kind: device.speed for device in state.devices}
        taken = {device for running in state.running for device in running.devices}
        self._free = FreeDevices(device for device in state.devices if device not in taken)
        """For jobs that end before the head can start."""
        self._unkept = self._free
        """For all others."""
        self._head: Reservation | None = None
        self._holding = {each.job: each for each in state.running}
        """Jobs that have devices, including those that were given some in this pass."""
        self._victims = _Victims(state, frozenset(state.devices))

    def decisions(self) -> Iterator[Decision]:
        """Yield first the jobs that end, then what each queued job does."""
        yield from self._over()
        order = effective_priorities(self._state, self._now_s, self._policy)
        for job in sorted(self._state.queued, key=lambda job: (-order[job.job], job.since_s, job.job)):
            yield from self._for(job)

    def _for(self, job: Queued) -> Iterator[Decision]:
        needs = self.needs(job)
        if not self._could_ever_start(needs):
            there = counts_of(self._there)
            yield Wait(job.job, WaitReason(kind=WaitKind.TOO_FEW_DEVICES, needed=needs, present=there))
        elif self._head and not self._policy.backfill:
            yield Wait(job.job, WaitReason(kind=WaitKind.IN_ORDER, needed=needs, ahead=self._head.job))
        elif start := self._start(job, needs):
            yield start
        elif victims := self._found_victims(job, needs):
            yield from self._preempted(job, needs, victims)
        elif self._head:
            yield Wait(job.job, self._behind(needs, self._head))
        else:
            yield self._first(job, needs)

    def needs(self, job: Queued) -> Needs:
        """Return what a job asks for, in the kinds of this cluster."""
        return needs_of(job.request, self._kinds, len(self._state.devices))

    def reserved(self, job: Queued, needs: Needs) -> Reservation | None:
        """Add to what is free what running jobs give back, the first to end first, until it is enough."""
        free, at_s, after = FreeDevices(self._unkept), self._now_s, None
        coming = sorted(self._holding.values(), key=lambda each: (each.ends_s, each.started_s, each.job))
        speed_of = self._speed_of(job)
        for running in (None, *coming):
            if running:
                free.add(self._victims.devices_of(running))
                at_s, after = max(at_s, running.ends_s), running.job
            devices = free.choose(needs, speed_of, self._policy)
            if devices:
                return Reservation(job.job, frozenset(devices), at_s, after)
        return None

    def _over(self) -> Iterator[Stop]:
        for running in sorted(self._state.running, key=lambda each: each.job):
            if running.max_time_s is not None and not running.is_leaving and self._now_s >= running.ends_s:
                self._victims.go(running)
                yield Stop(running.job, StopReason(kind=StopKind.TIME_LIMIT, limit_s=running.max_time_s))

    def _could_ever_start(self, needs: Needs) -> bool:
        """Whether the cluster would have enough devices if it were empty."""
        return bool(self._state.devices) and chosen_of(needs, self._there, self._default.__getitem__) is not None

    def _start(self, job: Queued, needs: Needs) -> Start | None:
        """Start it on what is free and kept for no other job, or kept for later than it ends."""
        # Of two that have no limit it is unknown which ends first.
        ends_before = self._head and job.max_time_s is not None and self._now_s + job.max_time_s <= self._head.at_s
        free = self._free if ends_before else self._unkept
        devices = free.choose(needs, self._speed_of(job), self._policy)
        if not devices:
            return None
        self._take(devices)
        self._hold(job, devices)
        return Start(job.job, devices, self._start_reason(devices))

    def _start_reason(self, devices: Sequence[DeviceSlot]) -> StartReason:
        kind = StartKind.IN_TURN
        if self._head:
            overlaps = self._head.devices.intersection(devices)
            kind = StartKind.ENDS_BEFORE if overlaps else StartKind.NOT_NEEDED
        counts = counts_of(Counter(device.kind for device in devices))
        nodes = tuple(dict.fromkeys(device.node for device in devices))
        return StartReason(kind=kind, devices=counts, nodes=nodes, ahead=self._head.job if self._head else None)

    def _hold(self, job: Queued, devices: Sequence[DeviceSlot]) -> None:
        self._holding[job.job] = Running(job.job, tuple(devices), started_s=self._now_s, max_time_s=job.max_time_s)

    def _take(self, devices: Sequence[DeviceSlot]) -> None:
        self._free.take(devices)
        if self._head:
            self._unkept.take(device for device in devices if device not in self._head.devices)

    def _first(self, job: Queued, needs: Needs) -> Wait:
        """Keep devices for it: it cannot start, and no job before it waits."""
        head = self.reserved(job, needs)
        assert head, "there are enough devices in all"
        self._unkept = FreeDevices(device for device in self._unkept if device not in head.devices)
        self._head = head
        at_latest_s = head.at_s - self._now_s if head.at_s < float("inf") else None
        reason = WaitReason(
            kind=WaitKind.FIRST_IN_LINE,
            needed=needs,
            free=counts_of(self._free.counts),
            blocked_by=() if head.after is None else (head.after,),
            at_latest_s=at_latest_s,
        )
        return Wait(job.job, reason)

    def _behind(self, needs: Needs, head: Reservation) -> WaitReason:
        free, kept = counts_of(self._free.counts), self._free.counts.total() - self._unkept.counts.total()
        return WaitReason(kind=WaitKind.BEHIND, needed=needs, free=free, kept=kept, ahead=head.job)

    def _found_victims(self, job: Queued, needs: Needs) -> tuple[Running, ...]:
        """Return the running jobs that must stop so that it can start, including those that are stopping already."""
        if not self._policy.preempts:
            return ()
        # Jobs whose devices are kept for the head are spared.
        spared = self._head.devices if self._head else frozenset()
        return self._victims.found(job.priority, needs, self._unkept.counts, self._speed_of(job), spared)

    def _preempted(self, job: Queued, needs: Needs, victims: tuple[Running, ...]) -> Iterator[Decision]:
        """Keep their devices, and what else it needs, for it alone."""
        pool = FreeDevices(self._unkept)
        pool.add(device for victim in victims for device in self._victims.devices_of(victim))
        devices = pool.choose(needs, self._speed_of(job), self._policy)
        assert devices, "victims are those that make it enough"
        free, promised = set(self._unkept), set(devices)
        self._take([device for device in devices if device in free])
        self._hold(job, devices)
        for victim in victims:
            self._victims.spend(victim)
            left = tuple(device for device in victim.devices if device not in promised)
            self._holding[victim.job] = replace(victim, devices=left, is_leaving=True)
            if not victim.is_leaving:
                yield Preempt(victim.job, job.job, _preemption(victim, job))
        reason = WaitReason(
            kind=WaitKind.STOPPING,
            needed=needs,
            blocked_by=tuple(victim.job for victim in victims),
            saving=tuple(victim.job for victim in victims if victim.saves),
        )
        yield Wait(job.job, reason)

    def _speed_of(self, job: Queued) -> SpeedOf:
        """Return measured speeds; for kinds that it was not measured on, their usual speed relative to the others."""
        if not job.speeds:
            return self._default.__getitem__
        known = [job.speeds[kind] / self._default[kind] for kind in self._kinds if kind in job.speeds]
        scale = median(known) if known else 1.0
        speeds = {kind: job.speeds.get(kind, scale * self._default[kind]) for kind in self._kinds}
        return speeds.__getitem__


class _Victims:
    """Running jobs that can be told to stop, and those that are stopping."""

    def __init__(self, state: State, answering: frozenset[DeviceSlot]) -> None:
        self._answering = answering
        leaving = (each for each in state.running if each.is_leaving)
        self._going = {each.job: each for each in sorted(leaving, key=lambda each: each.job)}
        able = [each for each in state.running if each.preemptible and not each.is_leaving]
        # The least important first; of those the one that has done least.
        able.sort(key=lambda each: (each.priority, -each.started_s, each.job))
        self._able = {each.job: each for each in able}
        self._hopeless: dict[Needs, int] = {}

    def devices_of(self, running: Running) -> list[DeviceSlot]:
        """Return its devices that answer; no job can use the others."""
        return [device for device in running.devices if device in self._answering]

    def go(self, running: Running) -> None:
        """Take note that it has reached its time limit and was told to end."""
        self._able.pop(running.job, None)
        self._going[running.job] = replace(running, is_leaving=True, saves=False)

    def spend(self, running: Running) -> None:
        """Take note that its devices are promised to a job."""
        self._able.pop(running.job, None)
        self._going.pop(running.job, None)

    def found(
        self, priority: int, needs: Needs, free: Counter[str], speed_of: SpeedOf, spared: frozenset[DeviceSlot]
    ) -> tuple[Running, ...]:
        """Return few jobs whose devices, with those that are free, are enough; none if there are none."""
        # In the course of a decision devices only become fewer: what failed once fails again.
        if priority <= self._hopeless.get(needs, -1):
            return ()
        lower = (each for each in self._able.values() if each.priority < priority)
        pool, chosen = Counter(free), []
        for running in (*self._going.values(), *lower):
            if not spared.isdisjoint(running.devices):
                continue
            chosen.append(running)
            pool.update(device.kind for device in self.devices_of(running))
            if chosen_of(needs, pool, speed_of) is not None:
                return self._without_needless(chosen, pool, needs, speed_of)
        self._hopeless[needs] = priority
        return ()

    def _without_needless(
        self, chosen: list[Running], pool: Counter[str], needs: Needs, speed_of: SpeedOf
    ) -> tuple[Running, ...]:
        """Spare the jobs that it can, the most important first. Those that are stopping stop anyway."""
        for running in sorted(chosen, key=lambda each: (each.is_leaving, -each.priority, each.started_s, each.job)):
            without = pool - Counter(device.kind for device in self.devices_of(running))
            if len(chosen) > 1 and chosen_of(needs, without, speed_of) is not None:
                chosen.remove(running)
                pool = without
        return tuple(chosen)


def _preemption(victim: Running, job: Queued) -> StopReason:
    return StopReason(kind=StopKind.PREEMPT, priority=victim.priority, for_job=job.job, for_priority=job.priority)
