"""Looks at what workers report, and names who holds the others up: in the job's events, its log, and the server's."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mimatrix.api.models import JobState, Report, StragglerReport
from mimatrix.monitor.hangs import Hang, hanging
from mimatrix.monitor.rank_metrics import Awaited, RankFigures
from mimatrix.monitor.stragglers import Slow, Slowness
from mimatrix.server.context import Context
from mimatrix.server.db.models import JobRow
from mimatrix.server.jobs.lifecycle import is_active, note
from mimatrix.server.metrics.live_state import LiveJob


@dataclass
class _Watched:
    """One job in one generation."""

    generation: int
    slowness: dict[int, Slowness] = field(default_factory=lambda: defaultdict(Slowness))
    """By group: who does not wait for somebody is not slower than he."""
    hanging: dict[int, int | None] = field(default_factory=dict)
    """The rank of each group that does not come."""


class Watching:
    """All jobs that run."""

    def __init__(self, context: Context, say: Callable[[str], None]) -> None:
        self._context, self._say = context, say
        self._watched: dict[int, _Watched] = {}

    def look(self) -> None:
        """Once around."""
        jobs = self._context.live.all()
        self._watched = {number: each for number, each in self._watched.items() if number in jobs}
        for number, live in jobs.items():
            watched = self._watched.get(number)
            if watched is None or watched.generation != live.generation:
                watched = self._watched[number] = _Watched(live.generation)
            self._look_at(number, live, watched)

    def _look_at(self, number: int, live: LiveJob, watched: _Watched) -> None:
        ranks = figures_of(live)
        trains = bool(ranks) and live.reports[ranks[0].rank].state is JobState.TRAINING
        groups: dict[int, list[RankFigures]] = {}
        for each in ranks:
            groups.setdefault(live.reports[each.rank].group, []).append(each)
        troubles: list[StragglerReport] = []
        for group, members in groups.items():
            troubles += self._look_at_group(number, live, watched, group, members if trains else [])
        live.troubles = tuple(troubles)

    def _look_at_group(
        self, number: int, live: LiveJob, watched: _Watched, group: int, ranks: Sequence[RankFigures]
    ) -> list[StragglerReport]:
        """Those that wait for each other; in a job that is not split into groups, all."""
        slowness = watched.slowness[group]
        new = slowness.observe(self._context.clock(), ranks if len(live.reports) == live.ranks else ())
        stuck = hanging(ranks)
        # Figures of steps are old where there are no more steps.
        slow = slowness.named if stuck is None else None
        if new:
            self._tell(number, live, str(new))
        if stuck and stuck.rank != watched.hanging.get(group):
            self._tell(number, live, str(stuck))
        watched.hanging[group] = stuck.rank if stuck else None
        return [trouble_of(each) for each in (stuck, slow) if each]

    def _tell(self, number: int, live: LiveJob, sentence: str) -> None:
        live.notices.append(sentence)
        self._say(f"job {number}: {sentence}")
        with self._context.sessions.begin() as session:
            job = session.get(JobRow, number, with_for_update=True)
            if job and job.generation == live.generation and is_active(job):
                note(session, job, sentence, self._context.clock())


def figures_of(live: LiveJob) -> list[RankFigures]:
    """What each rank said last."""
    by_group: dict[int, list[int]] = {}
    for rank, said in sorted(live.reports.copy().items()):
        by_group.setdefault(said.group, []).append(rank)

    def peer_of(said: Report) -> int | None:
        """By its number in the job. As long as not all have reported nobody knows."""
        number, members = said.waiting.peer if said.waiting else None, by_group.get(said.group, [])
        return members[number] if number is not None and number < len(members) else None

    return [
        RankFigures(
            rank=rank,
            place=live.seats[rank],
            at_s=live.heard.get(rank, 0.0),
            step=said.step,
            step_s=said.step_s,
            compute_s=said.compute_s,
            data_s=said.data_s,
            waiting_s=said.waiting_s,
            communication_s=said.communication_s,
            planned_s=said.planned_s,
            follows=said.follows,
            memory_full=_full(said.use.memory_bytes, said.use.memory_total_bytes) if said.use else 0.0,
            awaited=Awaited(said.waiting.call, said.waiting.round, peer_of(said), said.waiting.seconds)
            if said.waiting
            else None,
            aside=said.aside,
        )
        for rank, said in sorted(live.reports.copy().items())
        if rank < live.ranks and rank not in live.gone
    ]


def trouble_of(found: Slow | Hang) -> StragglerReport:
    """For people."""
    if isinstance(found, Hang):
        return StragglerReport(
            kind="hang",
            rank=found.rank,
            seat=found.place,
            cause="",
            lost_s=found.since_s,
            sentence=str(found),
        )
    return StragglerReport(
        kind="slow", rank=found.rank, seat=found.place, cause=found.cause, lost_s=found.lost_s, sentence=str(found)
    )


def _full(used: int | None, total: int | None) -> float:
    return used / total if used is not None and total else 0.0
