"""What workers said last. It is in memory alone: a report costs no write, and after a restart workers say it again."""

from dataclasses import dataclass, field
from threading import Lock

from mimatrix.wire.messages import Join, Report

AGAIN_S = 1.0
_CALM_S = 5.0
_MANY = 64


@dataclass
class LiveJob:
    """The workers of one job in one generation."""

    generation: int
    ranks: int
    joined: dict[int, Join] = field(default_factory=dict)
    reports: dict[int, Report] = field(default_factory=dict)
    leave: bool = False


class Live:
    """All jobs that run."""

    def __init__(self) -> None:
        self._jobs: dict[int, LiveJob] = {}
        self._lock = Lock()

    def begin(self, job: int, generation: int, ranks: int, *, leave: bool = False) -> None:
        """It was started, or found again after a restart of the server."""
        with self._lock:
            found = self._jobs.get(job)
            if found is None or found.generation != generation:
                self._jobs[job] = LiveJob(generation, ranks, leave=leave)

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

    def again_s(self) -> float:
        """How soon workers should report again: the more there are, the later."""
        workers = sum(len(job.reports) for job in self._jobs.copy().values())
        return AGAIN_S if workers < _MANY else _CALM_S
