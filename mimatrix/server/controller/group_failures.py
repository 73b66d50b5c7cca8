"""Groups that are lost while others go on, and groups that return: each is said once, as an event and in the log."""

from collections.abc import Callable

from sqlalchemy import select

from mimatrix.hybrid.groups import Groups
from mimatrix.launch import Phase, TeamState
from mimatrix.server.context import Context, team_name
from mimatrix.server.controller.exit_causes import first_failed, groups_of, last_words, lost_ranks, told
from mimatrix.server.db.models import EventRow, JobRow
from mimatrix.server.jobs.lifecycle import note
from mimatrix.server.metrics.live_state import LiveJob


def note_losses(context: Context, number: int, generation: int, state: TeamState, say: Callable[[str], None]) -> None:
    """Look at a team that runs. Nobody waits for the ranks of a group that is gone."""
    live = context.live.of(number, generation)
    if live is None or all(member.phase not in _ENDED and not member.restarts for member in state.members):
        return
    with context.sessions() as session:
        job = session.get_one(JobRow, number)
        # Who was told to go is not lost.
        groups = groups_of(job.environment, live.ranks) if not job.leaving else ()
    said = [*_returned(live, state, groups), *_lost(context, live, team_name(number, generation), state, groups)]
    for what, reason in said:
        sentence = f"{what}: {reason}"
        with context.sessions.begin() as session:
            known = select(EventRow.id).where(EventRow.job == number, EventRow.reason.startswith(what, autoescape=True))
            if session.scalar(known.where(EventRow.generation == generation)) is None:
                note(session, session.get_one(JobRow, number), sentence, context.clock())
                live.notices.append(sentence)
                say(f"job {number}: {sentence}")


_ENDED = (Phase.EXITED, Phase.LOST)


def _lost(context: Context, live: LiveJob, team: str, state: TeamState, groups: Groups) -> list[tuple[str, str]]:
    """What happened, and why: of the same one, each time another reason may be known."""
    said = []
    for group, rank in lost_ranks(state, groups).items():
        if not live.gone.issuperset(groups[group]):
            live.gone |= frozenset(groups[group])
            reason = told(rank, live.seats[rank], state.members[rank], last_words(context.launcher, team, rank))
            returns = state.members[rank].restarts
            after = f" after return {returns}" if returns else ""
            said.append((f"group {group} was lost{after}, the others go on", reason))
    return said


def _returned(live: LiveJob, state: TeamState, groups: Groups) -> list[tuple[str, str]]:
    said = []
    for group, ranks in enumerate(groups):
        returns = max(state.members[rank].restarts for rank in ranks)
        if returns > live.returned.get(group, 0):
            live.returned[group] = returns
            live.gone -= frozenset(ranks)
            for rank in ranks:
                live.reports.pop(rank, None)  # of the one before
            rank = first_failed(state, [rank for rank in ranks if state.members[rank].cause] or ranks)
            reason = told(rank, live.seats[rank], state.members[rank])
            said.append((f"group {group} is started again (return {returns})", reason))
    return said
