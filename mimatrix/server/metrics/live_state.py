"""What workers reported last. It is in memory alone: a report costs no write, and after a restart workers report again.

Only the methods of `LiveJob` change what it holds, under one lock; what they return is a copy or immutable.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock

from mimatrix.api.models import Logged, RendezvousRequest, Report, StragglerReport

AGAIN_S = 1.0
_CALM_S = 5.0
_MANY = 64
_MAX_NOTICES = 8
_MAX_LOGGED = 1000
_MAX_NAMES = 64
_MAX_SAMPLES_PER_S = 1e12
_STALE_S = 15.0
"""Older reports say nothing about the present."""
_PLAN_EVENTS_S = 60.0
"""Where speeds jump, splits change every few steps: not each of them is worth an event."""


class LiveJob:
    """The workers of one job in one generation."""

    def __init__(self, generation: int, devices: Sequence[str], *, leave: bool = False) -> None:
        self.generation = generation
        self.devices = tuple(devices)
        """Those of its ranks, in their order."""
        self._lock = Lock()
        self._joined: dict[int, RendezvousRequest] = {}
        self._reports: dict[int, Report] = {}
        self._last_seen: dict[int, float] = {}
        self._leave = leave
        self._plan_told_s = float("-inf")
        self._stragglers: tuple[StragglerReport, ...] = ()
        self._notices: deque[str] = deque(maxlen=_MAX_NOTICES)
        self._logged: deque[Logged] = deque(maxlen=_MAX_LOGGED)
        self._rare: dict[str, float | None] = {}
        self._lost: frozenset[int] = frozenset()
        self._restarts: dict[int, int] = {}

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.devices)

    # Written by workers

    def join(self, rank: int, message: RendezvousRequest) -> RendezvousRequest | None:
        """Record that a worker is there; return what rank 0 said, once it has."""
        with self._lock:
            self._joined[rank] = message
            return self._joined.get(0)

    def record_report(self, rank: int, report: Report, now_s: float) -> bool:
        """Take in a report; return whether this rank is the leader, which speaks for the job."""
        with self._lock:
            self._reports[rank], self._last_seen[rank] = report, now_s
            is_leader = rank == self._leader()
            if is_leader:
                self._take_logged(report.logged)
            return is_leader

    def pop_notice(self) -> str:
        """Return the next sentence for the job's log, if there is one; it is told to the leader."""
        with self._lock:
            return self._notices.popleft() if self._notices else ""

    def claim_plan_event(self, now_s: float) -> bool:
        """Whether a change of plan is worth an event now; if so, the next is for a while not."""
        with self._lock:
            is_due = now_s - self._plan_told_s >= _PLAN_EVENTS_S
            self._plan_told_s = now_s if is_due else self._plan_told_s
            return is_due

    # Written by the controller

    def tell_to_leave(self) -> None:
        """Have workers save and stop; they hear it in the answer to their next report."""
        self._leave = True

    def add_notice(self, sentence: str) -> None:
        """Queue a sentence for the job's log; of many the oldest are dropped."""
        with self._lock:
            self._notices.append(sentence)

    def mark_lost(self, ranks: Iterable[int]) -> None:
        """Ignore these ranks from now on: their group was lost while others keep training."""
        with self._lock:
            self._lost |= frozenset(ranks)

    def mark_restarted(self, group: int, ranks: Sequence[int], restarts: int) -> None:
        """Count a restart of a group; its ranks are back, and what they reported before is dropped."""
        with self._lock:
            self._restarts[group] = restarts
            self._lost -= frozenset(ranks)
            for rank in ranks:
                self._reports.pop(rank, None)

    def set_stragglers(self, stragglers: Iterable[StragglerReport]) -> None:
        """Replace the ranks that hold the others up."""
        self._stragglers = tuple(stragglers)

    def drain_logged(self) -> list[Logged]:
        """Return what was logged since the last call, and drop it."""
        with self._lock:
            logged = list(self._logged)
            self._logged.clear()
            return logged

    # Read by all

    @property
    def leave(self) -> bool:
        """Whether workers are to save and stop."""
        return self._leave

    @property
    def stragglers(self) -> tuple[StragglerReport, ...]:
        """Return the ranks that hold the others up."""
        return self._stragglers

    @property
    def lost_ranks(self) -> frozenset[int]:
        """Return the ranks of groups that were lost while others keep training."""
        return self._lost

    def group_restarts(self, group: int) -> int:
        """Return how often a group was restarted, as far as that was recorded."""
        return self._restarts.get(group, 0)

    @property
    def reports(self) -> dict[int, Report]:
        """Return the last report of each rank, in the order of ranks."""
        with self._lock:
            return dict(sorted(self._reports.items()))

    def last_seen(self, rank: int) -> float:
        """Return when a rank reported last, by the server's wall clock; 0 if never."""
        return self._last_seen.get(rank, 0.0)

    @property
    def leader_report(self) -> Report | None:
        """Return what the leader reported last: its step and its state are the job's."""
        with self._lock:
            return self._reports.get(self._leader())

    @property
    def group_leaders(self) -> dict[int, Report]:
        """Return the last report of the first rank of each group, by rank; without groups there is one."""
        found: dict[int, tuple[int, Report]] = {}
        for rank, report in self.reports.items():
            if rank not in self._lost:
                found.setdefault(report.group, (rank, report))
        return dict(found.values())

    @property
    def samples_per_s(self) -> float:
        """Return the rate of all groups together."""
        return min(_MAX_SAMPLES_PER_S, sum(report.samples_per_s for report in self.group_leaders.values()))

    @property
    def metrics(self) -> dict[str, float | None]:
        """Return what the script logs, and the staleness of pushes where there are groups."""
        pushed = [report.pushed.staleness for report in self.group_leaders.values() if report.pushed]
        staleness = {"staleness": sum(pushed) / len(pushed)} if pushed else {}
        leader = self.leader_report
        return (leader.metrics if leader else {}) | staleness

    @property
    def newest_metrics(self) -> dict[str, float | None]:
        """Return the last value of everything that the script logs, including evaluations."""
        often = self.metrics
        return often | {name: value for name, value in self._rare.items() if name not in often}

    def _leader(self) -> int:
        """Return the first rank that is not lost."""
        return next((rank for rank in range(self.ranks) if rank not in self._lost), 0) if self._lost else 0

    def _take_logged(self, logged: Sequence[Logged]) -> None:
        self._logged.extend(logged)
        for entry in logged:
            known = {name: value for name, value in entry.metrics.items() if name in self._rare}
            self._rare = {**self._rare, **(entry.metrics if len(self._rare) < _MAX_NAMES else known)}


def reports_by_device(jobs: Mapping[int, LiveJob], now_s: float) -> dict[str, Report]:
    """Return the last report from each device that has a worker and reported a moment ago."""
    return {
        live.devices[rank]: report
        for live in jobs.values()
        for rank, report in live.reports.items()
        if rank < live.ranks and now_s - live.last_seen(rank) < _STALE_S
    }


class Live:
    """All jobs that run, and the order of those that wait."""

    def __init__(self) -> None:
        self._jobs: dict[int, LiveJob] = {}
        self._positions: Mapping[int, int] = {}
        self._lock = Lock()

    def begin(self, job: int, generation: int, devices: Sequence[str], *, leave: bool = False) -> None:
        """Add a job that was started, or found again after a restart of the server."""
        with self._lock:
            known = self._jobs.get(job)
            if known is None or known.generation != generation:
                self._jobs[job] = LiveJob(generation, devices, leave=leave)

    def all(self) -> dict[int, LiveJob]:
        """Return all jobs by their numbers."""
        with self._lock:
            return dict(self._jobs)

    def get(self, job: int, generation: int) -> LiveJob | None:
        """Return a job in this generation; None if it runs in another one, or not at all."""
        found = self._jobs.get(job)
        return found if found and found.generation == generation else None

    def forget(self, job: int) -> None:
        """Drop a job that has ended."""
        with self._lock:
            self._jobs.pop(job, None)

    @property
    def queue_positions(self) -> Mapping[int, int]:
        """Return the positions of waiting jobs in the queue, from 1."""
        return self._positions

    def set_queue(self, jobs: Iterable[int]) -> None:
        """Replace the order of waiting jobs."""
        self._positions = {job: position for position, job in enumerate(jobs, start=1)}

    def report_interval_s(self) -> float:
        """Return how soon workers should report again: the more there are, the later."""
        workers = sum(job.ranks for job in self.all().values())
        return AGAIN_S if workers < _MANY else _CALM_S
