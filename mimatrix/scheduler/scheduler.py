"""Who starts, who waits, who goes: a pure function of state and time. Every decision has its reason.

Jobs are looked at in the order of their standing: priority, plus what waiting adds, minus what their users had of
late. The first that cannot start is the *head*: the devices that it will get are kept for it, and jobs behind it may
have them only for as long as it has to wait anyway. A job may have running ones of lower priority save and go.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from mimatrix.core.units import format_seconds
from mimatrix.scheduler.placement import Needs, Seating, SpeedOf, chosen_of, needs_of
from mimatrix.scheduler.state import Decision, End, Policy, Preempt, Queued, Running, Seat, Start, State, Wait


def decide(state: State, now_s: float, policy: Policy = Policy()) -> tuple[Decision, ...]:
    """What to do now. The same state and time give the same decisions."""
    return tuple(_Deciding(state, now_s, policy).decisions())


def standings(state: State, now_s: float, policy: Policy) -> dict[str, float]:
    """What decides the order of queued jobs: the larger comes first."""
    users = {*state.used, *(each.user for each in state.queued), *(each.user for each in state.running)}
    total = sum(state.used.values())
    over = {user: state.used.get(user, 0.0) / total - 1 / len(users) if total else 0.0 for user in users}
    ageing = 1 / policy.ageing_s if policy.ageing_s else 0.0
    return {
        job.job: job.priority + ageing * max(0.0, now_s - job.since_s) - policy.fair * over[job.user]
        for job in state.queued
    }


@dataclass(frozen=True, slots=True)
class Reservation:
    """Devices that are kept for a job, and when it can have all of them at the latest."""

    job: str
    seats: frozenset[Seat]
    at_s: float
    after: str
    """The job that ends last before it; nothing if it need not wait."""


def reservation(job: Queued, state: State, now_s: float, policy: Policy = Policy()) -> Reservation | None:
    """The devices that a job would get first if nobody else started, and when; None where it can never start."""
    found = _Deciding(state, now_s, policy)
    return found.reserved(job, found.needs(job))


class _Deciding:
    """One decision: what is free, and for whom."""

    def __init__(self, state: State, now_s: float, policy: Policy) -> None:
        self._state, self._now_s, self._policy = state, now_s, policy
        self._kinds = tuple(sorted({seat.kind for seat in state.seats}))
        self._there = Counter(seat.kind for seat in state.seats)
        self._default = {seat.kind: seat.speed for seat in state.seats}
        taken = {seat for running in state.running for seat in running.seats}
        self._free = Seating(seat for seat in state.seats if seat not in taken)
        """For jobs that end before the head can start."""
        self._unkept = self._free
        """For all others."""
        self._head: Reservation | None = None
        self._holding = {each.job: each for each in state.running}
        """Who has devices, those that were given some just now included."""
        self._victims = _Victims(state, frozenset(state.seats))

    def decisions(self) -> Iterator[Decision]:
        """All of them: first what ends, then for each queued job what becomes of it."""
        yield from self._over()
        order = standings(self._state, self._now_s, self._policy)
        for job in sorted(self._state.queued, key=lambda job: (-order[job.job], job.since_s, job.job)):
            yield from self._for(job)

    def _for(self, job: Queued) -> Iterator[Decision]:
        needs = self.needs(job)
        lacking = self._lacking(needs)
        if lacking:
            yield Wait(job.job, lacking)
        elif self._head and not self._policy.backfill:
            yield Wait(job.job, f"{self._head.job} comes first, and nobody may overtake")
        elif start := self._start(job, needs):
            yield start
        elif victims := self._found_victims(job, needs):
            yield from self._preempted(job, needs, victims)
        elif self._head:
            yield Wait(job.job, self._behind(needs, self._head))
        else:
            yield self._first(job, needs)

    def needs(self, job: Queued) -> Needs:
        """What it asks for, in the kinds of this cluster."""
        return needs_of(job.wish, self._kinds, len(self._state.seats))

    def reserved(self, job: Queued, needs: Needs) -> Reservation | None:
        """What is free, and what running jobs give back, the first to end first, until it is enough."""
        free, at_s, after = Seating(self._unkept), self._now_s, ""
        coming = sorted(self._holding.values(), key=lambda each: (each.ends_s, each.started_s, each.job))
        speed_of = self._speed_of(job)
        for running in (None, *coming):
            if running:
                free.add(self._victims.seats_of(running))
                at_s, after = max(at_s, running.ends_s), running.job
            seats = free.choose(needs, speed_of, self._policy)
            if seats:
                return Reservation(job.job, frozenset(seats), at_s, after)
        return None

    def _over(self) -> Iterator[End]:
        for running in sorted(self._state.running, key=lambda each: each.job):
            if running.max_time_s is not None and not running.is_leaving and self._now_s >= running.ends_s:
                self._victims.go(running)
                yield End(running.job, f"its time limit of {format_seconds(running.max_time_s)} is over")

    def _lacking(self, needs: Needs) -> str:
        """Why it cannot start even on an empty cluster, if so."""
        if self._state.seats and chosen_of(needs, self._there, self._default.__getitem__) is not None:
            return ""
        there = _counted(self._there) or "none"
        return f"needs {_asked(needs)}, and the cluster has {there}; it waits until there are more"

    def _start(self, job: Queued, needs: Needs) -> Start | None:
        """With what is free and kept for nobody, or kept for later than it ends."""
        # Of two that have no limit nobody knows which ends first.
        ends_before = self._head and job.max_time_s is not None and self._now_s + job.max_time_s <= self._head.at_s
        free = self._free if ends_before else self._unkept
        seats = free.choose(needs, self._speed_of(job), self._policy)
        if not seats:
            return None
        self._take(seats)
        self._hold(job, seats)
        reason = f"{_counted(Counter(seat.kind for seat in seats))} {_where(seats)}: the best that is free"
        if self._head and self._head.seats.intersection(seats):
            reason += f"; it ends before {self._head.job} can have them"
        elif self._head:
            reason += f"; {self._head.job} comes first, but does not need them"
        return Start(job.job, seats, reason)

    def _hold(self, job: Queued, seats: Sequence[Seat]) -> None:
        self._holding[job.job] = Running(job.job, tuple(seats), started_s=self._now_s, max_time_s=job.max_time_s)

    def _take(self, seats: Sequence[Seat]) -> None:
        self._free.take(seats)
        if self._head:
            self._unkept.take(seat for seat in seats if seat not in self._head.seats)

    def _first(self, job: Queued, needs: Needs) -> Wait:
        """It cannot start, and nobody before it waits: devices are kept for it."""
        head = self.reserved(job, needs)
        assert head, "there are enough devices in all"
        self._unkept = Seating(seat for seat in self._unkept if seat not in head.seats)
        self._head = head
        known = head.at_s < float("inf")
        when = f", at the latest in {format_seconds(head.at_s - self._now_s)}" if known else ""
        return Wait(job.job, f"needs {_asked(needs)}, {self._now_free()}; first in line when {head.after} ends{when}")

    def _behind(self, needs: Needs, head: Reservation) -> str:
        kept = sum(self._free.counts.values()) - sum(self._unkept.counts.values())
        also = f", {kept} of them kept for {head.job}" if kept else f"; {head.job} comes first"
        return f"needs {_asked(needs)}, {self._now_free()}{also}"

    def _now_free(self) -> str:
        return f"{_counted(self._free.counts)} free" if any(self._free.counts.values()) else "none free"

    def _found_victims(self, job: Queued, needs: Needs) -> tuple[Running, ...]:
        """Running jobs that must go so that it can start, those that are leaving already included."""
        if not self._policy.preempts:
            return ()
        # Who would be taken from the head is none.
        spared = self._head.seats if self._head else frozenset()
        return self._victims.found(job.priority, needs, self._unkept.counts, self._speed_of(job), spared)

    def _preempted(self, job: Queued, needs: Needs, victims: tuple[Running, ...]) -> Iterator[Decision]:
        """Keep their devices, and what else it needs, for it alone."""
        pool = Seating(self._unkept)
        pool.add(seat for victim in victims for seat in self._victims.seats_of(victim))
        seats = pool.choose(needs, self._speed_of(job), self._policy)
        assert seats, "victims are those that make it enough"
        free, promised = set(self._unkept), set(seats)
        self._take([seat for seat in seats if seat in free])
        self._hold(job, seats)
        for victim in victims:
            self._victims.spend(victim)
            left = tuple(seat for seat in victim.seats if seat not in promised)
            self._holding[victim.job] = replace(victim, seats=left, is_leaving=True)
            if not victim.is_leaving:
                low, high = victim.priority, job.priority
                yield Preempt(victim.job, job.job, f"{job.job} has priority {high} and it has {low}")
        yield Wait(job.job, f"needs {_asked(needs)}; waits for {_leaving(victims)}")

    def _speed_of(self, job: Queued) -> SpeedOf:
        """What was measured; for kinds that it was not measured on, by their usual speed beside the others."""
        if not job.speeds:
            return self._default.__getitem__
        known = [job.speeds[kind] / self._default[kind] for kind in self._kinds if kind in job.speeds]
        scale = median(known) if known else 1.0
        speeds = {kind: job.speeds.get(kind, scale * self._default[kind]) for kind in self._kinds}
        return speeds.__getitem__


class _Victims:
    """Running jobs that can be told to go, and those that are going."""

    def __init__(self, state: State, answering: frozenset[Seat]) -> None:
        self._answering = answering
        leaving = (each for each in state.running if each.is_leaving)
        self._going = {each.job: each for each in sorted(leaving, key=lambda each: each.job)}
        able = [each for each in state.running if each.preemptible and not each.is_leaving]
        # The least important first; of those the one that has done least.
        able.sort(key=lambda each: (each.priority, -each.started_s, each.job))
        self._able = {each.job: each for each in able}
        self._hopeless: dict[Needs, int] = {}

    def seats_of(self, running: Running) -> list[Seat]:
        """Those that answer; others are of no use to anybody."""
        return [seat for seat in running.seats if seat in self._answering]

    def go(self, running: Running) -> None:
        """Its time is over, and it was told to end just now."""
        self._able.pop(running.job, None)
        self._going[running.job] = replace(running, is_leaving=True, saves=False)

    def spend(self, running: Running) -> None:
        """Its devices are promised to somebody."""
        self._able.pop(running.job, None)
        self._going.pop(running.job, None)

    def found(
        self, priority: int, needs: Needs, free: Counter[str], speed_of: SpeedOf, spared: frozenset[Seat]
    ) -> tuple[Running, ...]:
        """As few as is easy to find whose devices, with those that are free, are enough; none where there are none."""
        # In the course of a decision devices only become fewer: what failed once fails again.
        if priority <= self._hopeless.get(needs, -1):
            return ()
        lower = (each for each in self._able.values() if each.priority < priority)
        pool, chosen = Counter(free), []
        for running in (*self._going.values(), *lower):
            if not spared.isdisjoint(running.seats):
                continue
            chosen.append(running)
            pool.update(seat.kind for seat in self.seats_of(running))
            if chosen_of(needs, pool, speed_of) is not None:
                return self._without_needless(chosen, pool, needs, speed_of)
        self._hopeless[needs] = priority
        return ()

    def _without_needless(
        self, chosen: list[Running], pool: Counter[str], needs: Needs, speed_of: SpeedOf
    ) -> tuple[Running, ...]:
        """Spare whom it can, the most important first. Those that are going go anyway."""
        for running in sorted(chosen, key=lambda each: (each.is_leaving, -each.priority, each.started_s, each.job)):
            without = pool - Counter(seat.kind for seat in self.seats_of(running))
            if len(chosen) > 1 and chosen_of(needs, without, speed_of) is not None:
                chosen.remove(running)
                pool = without
        return tuple(chosen)


def _asked(needs: Needs) -> str:
    """`2 x a100 + 4..8 devices`."""
    return " + ".join(_asked_one(need.least, need.most, need.kinds) for need in needs)


def _asked_one(least: int, most: int, kinds: tuple[str, ...]) -> str:
    count = str(least) if least == most else f"{least}..{most}"
    if len(kinds) == 1:
        return f"{count} x {kinds[0]}"
    return f"{count} device{'s' * (most > 1)}" + (" of a kind that is not there" if not kinds else "")


def _counted(counts: Counter[str]) -> str:
    """`2 x a100 + 1 x v100`."""
    return " + ".join(f"{count} x {kind}" for kind, count in sorted(counts.items()) if count)


def _leaving(victims: Sequence[Running]) -> str:
    """`x and y to save and go, and for z to end`."""
    saving = " and ".join(each.job for each in victims if each.saves)
    ending = " and ".join(each.job for each in victims if not each.saves)
    said = [f"{saving} to save and go"] * bool(saving) + [f"{ending} to end"] * bool(ending)
    return ", and for ".join(said)


def _where(seats: Sequence[Seat]) -> str:
    nodes = list(dict.fromkeys(seat.node for seat in seats))
    return f"on {nodes[0]}" if len(nodes) == 1 else f"on {len(nodes)} nodes"
