"""Groups that are lost while others keep training, and groups that are restarted: each is told once."""

import logging
from collections.abc import Iterator

from sqlalchemy import select

from mimatrix.api.models import EventKind
from mimatrix.launch import Phase, TeamState
from mimatrix.server.context import Context, team_name
from mimatrix.server.controller.exit_causes import Groups, failed_groups, failure_of, first_failed
from mimatrix.server.db.models import EventRow, JobRow
from mimatrix.server.jobs import events
from mimatrix.server.jobs.events import JobEvent
from mimatrix.server.jobs.lifecycle import record_event
from mimatrix.server.metrics.live_state import LiveJob

logger = logging.getLogger(__name__)
_ENDED = (Phase.EXITED, Phase.LOST)


def record_group_failures(context: Context, job: int, generation: int, state: TeamState) -> None:
    """Look at a team that runs; ranks of a group that is lost are no longer waited for."""
    live = context.live.get(job, generation)
    if live is None or all(member.phase not in _ENDED and not member.restarts for member in state.members):
        return
    with context.sessions() as session:
        row = session.get_one(JobRow, job)
        # A job that was told to stop loses no group.
        groups = tuple(map(tuple, row.groups)) if not row.stop_kind else ()
    team = team_name(job, generation)
    for event in (*_restarted(context, live, team, state, groups), *_lost(context, live, team, state, groups)):
        _record_once(context, job, live, event)


def _record_once(context: Context, job: int, live: LiveJob, event: JobEvent) -> None:
    """Record it unless it was before this start of the server."""
    with context.sessions.begin() as session:
        mine = (EventRow.job == job, EventRow.generation == live.generation, EventRow.kind == event.kind)
        known = [_identity(event.kind, data) for data in session.scalars(select(EventRow.data).where(*mine))]
        if _identity(event.kind, event.data) in known:
            return
        record_event(session, session.get_one(JobRow, job), event, context.clock())
    live.add_notice(event.sentence)
    logger.info("job %d: %s", job, event.sentence)


def _identity(kind: EventKind, data: dict[str, object]) -> tuple[object, ...]:
    return kind, data.get("group"), data.get("restarts")


def _lost(context: Context, live: LiveJob, team: str, state: TeamState, groups: Groups) -> Iterator[JobEvent]:
    for group, rank in failed_groups(state, groups).items():
        if not live.lost_ranks.issuperset(groups[group]):
            live.mark_lost(groups[group])
            failure = failure_of(context.launcher, team, rank, state, live.devices)
            yield events.group_lost(group, failure, state.members[rank].restarts)


def _restarted(context: Context, live: LiveJob, team: str, state: TeamState, groups: Groups) -> Iterator[JobEvent]:
    for group, ranks in enumerate(groups):
        restarts = max(state.members[rank].restarts for rank in ranks)
        if restarts > live.group_restarts(group):
            live.mark_restarted(group, ranks, restarts)
            failed = [rank for rank in ranks if state.members[rank].cause]
            failure = (
                failure_of(context.launcher, team, first_failed(state, failed), state, live.devices) if failed else None
            )
            yield events.group_restarted(group, failure, restarts)
