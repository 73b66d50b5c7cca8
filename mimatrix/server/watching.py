"""Looks at what workers report, and names who holds the others up: in the job's events, its log, and the server's."""

from collections.abc import Callable
from dataclasses import dataclass, field

from mimatrix.monitor.figures import Awaited, RankFigures
from mimatrix.monitor.silence import Hang, hanging
from mimatrix.monitor.slowness import Slow, Slowness
from mimatrix.server.context import Context
from mimatrix.server.life import is_active, note
from mimatrix.server.live import LiveJob
from mimatrix.server.tables import JobRow
from mimatrix.wire.messages import JobState, Trouble


@dataclass
class _Watched:
    """One job in one generation."""

    generation: int
    slowness: Slowness = field(default_factory=Slowness)
    hanging: int | None = None
    """The rank that does not come."""


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
        now_s = self._context.clock()
        ranks = figures_of(live)
        trains = bool(ranks) and live.reports[ranks[0].rank].state is JobState.TRAINING
        new = watched.slowness.observe(now_s, ranks if trains and len(ranks) == live.ranks else ())
        stuck = hanging(ranks) if trains else None
        # Figures of steps are old where there are no more steps.
        slow = watched.slowness.named if stuck is None else None
        live.troubles = tuple(trouble_of(each) for each in (stuck, slow) if each)
        if new:
            self._tell(number, live, str(new))
        if stuck and stuck.rank != watched.hanging:
            self._tell(number, live, str(stuck))
        watched.hanging = stuck.rank if stuck else None

    def _tell(self, number: int, live: LiveJob, sentence: str) -> None:
        live.notices.append(sentence)
        self._say(f"job {number}: {sentence}")
        with self._context.sessions.begin() as session:
            job = session.get(JobRow, number, with_for_update=True)
            if job and job.generation == live.generation and is_active(job):
                note(session, job, sentence, self._context.clock())


def figures_of(live: LiveJob) -> list[RankFigures]:
    """What each rank said last."""
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
            awaited=Awaited(said.waiting.call, said.waiting.round, said.waiting.peer, said.waiting.seconds)
            if said.waiting
            else None,
            aside=said.aside,
        )
        for rank, said in sorted(live.reports.copy().items())
        if rank < live.ranks
    ]


def trouble_of(found: Slow | Hang) -> Trouble:
    """For people."""
    if isinstance(found, Hang):
        return Trouble(
            kind="hang",
            rank=found.rank,
            seat=found.place,
            cause="",
            lost_s=found.since_s,
            sentence=str(found),
        )
    return Trouble(
        kind="slow", rank=found.rank, seat=found.place, cause=found.cause, lost_s=found.lost_s, sentence=str(found)
    )


def _full(used: int | None, total: int | None) -> float:
    return used / total if used is not None and total else 0.0
