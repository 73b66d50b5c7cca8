"""Look at what workers report, and name ranks that hold the others up: in events, in the job's log, in the server's."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from mimatrix.api.models import JobState, Report, StragglerReport
from mimatrix.monitor.hangs import Hang, find_hang
from mimatrix.monitor.rank_metrics import Awaited, RankFigures
from mimatrix.monitor.stragglers import Straggler, StragglerTracker
from mimatrix.server.context import Context
from mimatrix.server.controller.faults import Faults
from mimatrix.server.db.models import JobRow
from mimatrix.server.jobs import events
from mimatrix.server.jobs.events import JobEvent
from mimatrix.server.jobs.lifecycle import record_event, state_of
from mimatrix.server.metrics.live_state import LiveJob

logger = logging.getLogger(__name__)


@dataclass
class _Watched:
    """One job in one generation."""

    generation: int
    trackers: dict[int, StragglerTracker] = field(default_factory=lambda: defaultdict(StragglerTracker))
    """Keyed by group: ranks of different groups never wait for each other, so they are not compared."""
    hanging: dict[int, int | None] = field(default_factory=dict)
    """The rank of each group that others wait for in a collective."""


class StragglerWatch:
    """Follows all jobs that run."""

    def __init__(self, context: Context, faults: Faults) -> None:
        self._context, self._faults = context, faults
        self._watched: dict[int, _Watched] = {}

    def check(self) -> None:
        """Look at every job."""
        jobs = self._context.live.all()
        self._watched = {job: watched for job, watched in self._watched.items() if job in jobs}
        for job, live in jobs.items():
            watched = self._watched.get(job)
            if watched is None or watched.generation != live.generation:
                watched = self._watched[job] = _Watched(live.generation)
            with self._faults.contain("stragglers", job):
                self._check(job, live, watched)

    def _check(self, job: int, live: LiveJob, watched: _Watched) -> None:
        reports = live.reports
        ranks = figures_of(live, reports)
        trains = bool(ranks) and reports[ranks[0].rank].state is JobState.TRAINING
        groups: dict[int, list[RankFigures]] = {}
        for figures in ranks:
            groups.setdefault(reports[figures.rank].group, []).append(figures)
        found: list[Hang | Straggler] = []
        for group, members in groups.items():
            is_complete = len(reports) == live.ranks
            found += self._check_group(job, live, watched, group, members if trains else [], is_complete)
        live.set_stragglers(map(straggler_report, found))

    def _check_group(
        self, job: int, live: LiveJob, watched: _Watched, group: int, ranks: Sequence[RankFigures], is_complete: bool
    ) -> list[Hang | Straggler]:
        """Look at ranks that wait for each other; in a job without groups, all of them."""
        tracker = watched.trackers[group]
        new = tracker.observe(self._context.monotonic(), ranks if is_complete else ())
        hang = find_hang(ranks)
        # Step times are out of date where there are no more steps.
        straggler = tracker.named if hang is None else None
        if new:
            self._tell(job, live, events.straggler(new.describe(), {"group": group, **new.to_json()}))
        if hang and hang.rank != watched.hanging.get(group):
            self._tell(job, live, events.hang(hang.describe(), {"group": group, **hang.to_json()}))
        watched.hanging[group] = hang.rank if hang else None
        return [each for each in (hang, straggler) if each]

    def _tell(self, job: int, live: LiveJob, event: JobEvent) -> None:
        live.add_notice(event.sentence)
        logger.info("job %d: %s", job, event.sentence)
        with self._context.sessions.begin() as session:
            row = session.get(JobRow, job, with_for_update=True)
            if row and row.generation == live.generation and state_of(row).is_active:
                record_event(session, row, event, self._context.clock())


def figures_of(live: LiveJob, reports: dict[int, Report]) -> list[RankFigures]:
    """Return what each rank that is not lost reported last, in the order of ranks."""
    by_group: dict[int, list[int]] = {}
    for rank, report in reports.items():
        by_group.setdefault(report.group, []).append(rank)

    def peer_of(report: Report) -> int | None:
        """Return the rank in the job of the peer in the group; unknown as long as not all have reported."""
        number, members = report.waiting.peer if report.waiting else None, by_group[report.group]
        return members[number] if number is not None and number < len(members) else None

    return [
        RankFigures(
            rank=rank,
            device=live.devices[rank],
            at_s=live.last_seen(rank),
            step=report.step,
            step_s=report.step_s,
            compute_s=report.compute_s,
            data_s=report.data_s,
            waiting_s=report.waiting_s,
            communication_s=report.communication_s,
            planned_s=report.planned_s,
            follows=report.follows,
            memory_full=_full(report.use.memory_bytes, report.use.memory_total_bytes) if report.use else 0.0,
            awaited=Awaited(report.waiting.call, report.waiting.round, peer_of(report), report.waiting.seconds)
            if report.waiting
            else None,
            aside=report.aside,
        )
        for rank, report in reports.items()
        if rank < live.ranks and rank not in live.lost_ranks
    ]


def straggler_report(found: Straggler | Hang) -> StragglerReport:
    """Return what the API tells of a rank that holds the others up."""
    is_hang = isinstance(found, Hang)
    return StragglerReport(
        kind="hang" if is_hang else "slow",
        rank=found.rank,
        device=found.device,
        cause="" if isinstance(found, Hang) else found.cause.value,
        lost_s=found.since_s if isinstance(found, Hang) else found.lost_s,
        sentence=found.describe(),
    )


def _full(used: int | None, total: int | None) -> float:
    return used / total if used is not None and total else 0.0
