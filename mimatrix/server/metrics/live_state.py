"""What workers said last. It is in memory alone: a report costs no write, and after a restart workers say it again."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock

from mimatrix.api.models import Logged, RendezvousRequest, Report, StragglerReport

AGAIN_S = 1.0
_CALM_S = 5.0
_MANY = 64
_NOTICES = 8
_MOST_LOGGED = 1000
_MOST_NAMES = 64
_LATE_S = 15.0
"""Figures that are older say nothing of now."""


@dataclass
class LiveJob:
    """The workers of one job in one generation."""

    generation: int
    seats: tuple[str, ...]
    """The devices of its ranks."""
    joined: dict[int, RendezvousRequest] = field(default_factory=dict)
    reports: dict[int, Report] = field(default_factory=dict)
    heard: dict[int, float] = field(default_factory=dict)
    """When each reported last, by the server's clock."""
    leave: bool = False
    split_noted_s: float = float("-inf")
    """When a change of its plan was last written down."""
    troubles: tuple[StragglerReport, ...] = ()
    notices: deque[str] = field(default_factory=lambda: deque(maxlen=_NOTICES))
    """Sentences for its log."""
    logged: deque[Logged] = field(default_factory=lambda: deque(maxlen=_MOST_LOGGED))
    """What was logged now and then, such as evaluations, and is not in the history yet."""
    rare: dict[str, float | None] = field(default_factory=dict)
    """The last value of each of those."""
    gone: frozenset[int] = frozenset()
    """Ranks of groups that were lost, while others go on."""
    returned: dict[int, int] = field(default_factory=dict)
    """How often each group was started again, as far as that was said."""

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.seats)

    @property
    def speaker(self) -> int:
        """The first rank that is there; notices are for its log."""
        return next((rank for rank in range(self.ranks) if rank not in self.gone), 0) if self.gone else 0

    @property
    def first(self) -> Report | None:
        """What the first rank said that is there: its step and its state are the job's."""
        return self.reports.get(self.speaker)

    @property
    def firsts(self) -> dict[int, Report]:
        """What the first rank of each group said that is there, by its rank; without groups there is one."""
        found: dict[int, tuple[int, Report]] = {}
        for rank, said in sorted(self.reports.copy().items()):
            if rank not in self.gone:
                found.setdefault(said.group, (rank, said))
        return dict(found.values())

    @property
    def samples_per_s(self) -> float:
        """Of all groups together."""
        return sum(said.samples_per_s for said in self.firsts.values())

    @property
    def metrics(self) -> dict[str, float | None]:
        """What the script logs, and how late pushes are where there are groups."""
        late = [said.pushed.staleness for said in self.firsts.values() if said.pushed]
        pushed = {"staleness": sum(late) / len(late)} if late else {}
        return (self.first.metrics if self.first else {}) | pushed

    @property
    def newest_metrics(self) -> dict[str, float | None]:
        """The last value of everything that the script logs, evaluations included."""
        return self.metrics | {name: value for name, value in self.rare.items() if name not in self.metrics}

    def take_logged(self, logged: Sequence[Logged]) -> None:
        """Keep what its first rank has logged, for the history."""
        self.logged.extend(logged)
        for entry in logged:
            known = {name: value for name, value in entry.metrics.items() if name in self.rare}
            self.rare = {**self.rare, **entry.metrics} if len(self.rare) < _MOST_NAMES else {**self.rare, **known}


def said_on(jobs: Mapping[int, LiveJob], now_s: float) -> dict[str, Report]:
    """What was said of late on each device that has a worker."""
    return {
        live.seats[rank]: said
        for live in jobs.values()
        for rank, said in live.reports.copy().items()
        if rank < live.ranks and now_s - live.heard.get(rank, 0.0) < _LATE_S
    }


class Live:
    """All jobs that run."""

    def __init__(self) -> None:
        self._jobs: dict[int, LiveJob] = {}
        self.places: dict[int, int] = {}
        """Of jobs that wait in the queue, from 1; the loop writes a new one each time."""
        self._lock = Lock()

    def begin(self, job: int, generation: int, seats: Sequence[str], *, leave: bool = False) -> None:
        """It was started, or found again after a restart of the server."""
        with self._lock:
            found = self._jobs.get(job)
            if found is None or found.generation != generation:
                self._jobs[job] = LiveJob(generation, tuple(seats), leave=leave)

    def all(self) -> dict[int, LiveJob]:
        """By their numbers, as of now."""
        with self._lock:
            return dict(self._jobs)

    def of(self, job: int, generation: int) -> LiveJob | None:
        """What its workers said in this generation; None for another one."""
        found = self._jobs.get(job)
        return found if found and found.generation == generation else None

    def tell_to_leave(self, job: int) -> None:
        """Its workers hear it with the answer to their next report."""
        found = self._jobs.get(job)
        if found:
            found.leave = True

    def forget(self, job: int) -> None:
        """It has ended."""
        with self._lock:
            self._jobs.pop(job, None)

    def report_interval_s(self) -> float:
        """How soon workers should report again: the more there are, the later."""
        workers = sum(len(job.reports) for job in self._jobs.copy().values())
        return AGAIN_S if workers < _MANY else _CALM_S
