"""Jobs as the API shows them, also those whose stored data cannot be read."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from types import MappingProxyType

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from mimatrix.api import models as m
from mimatrix.server.context import Context
from mimatrix.server.db.models import JobRow
from mimatrix.server.db.unreadable import load_rows
from mimatrix.server.jobs.lifecycle import state_of

UNREADABLE = "the stored data of this job cannot be read; cancel it, or restore the database from a backup"


def to_job(row: JobRow, positions: Mapping[int, int] = MappingProxyType({})) -> m.Job:
    """Return a job for the API, with its position in the queue."""
    state = state_of(row)
    return m.Job(
        id=row.id,
        name=row.name,
        user=row.user,
        state=state,
        reason=row.reason,
        reason_data=row.reason_data,
        server_error=row.server_error,
        queue_position=positions.get(row.id) if state.is_waiting else None,
        script=row.script,
        arguments=tuple(row.arguments),
        devices=row.devices,
        priority=row.priority,
        preemptible=row.preemptible,
        max_time_s=row.max_time_s,
        max_restarts=row.max_restarts,
        groups=tuple(tuple(group) for group in row.groups),
        generation=row.generation,
        allocation=tuple(row.allocation),
        exit_code=row.exit_code,
        exit_cause=row.exit_cause,
        failed_rank=row.failed_rank,
        created_at=to_datetime(row.created_at),
        started_at=to_datetime(row.started_at) if row.started_at else None,
        ended_at=to_datetime(row.ended_at) if row.ended_at else None,
        progress=m.JobProgress.model_validate(row.progress),
    )


def load_page(context: Context, session: Session, wanted: Select[JobRow]) -> dict[int, m.Job | None]:
    """Read jobs and return them by id, in the order of the query; None: nothing of it can be shown."""
    unread: list[int] = []

    def contain(number: int) -> AbstractContextManager[None]:
        unread.append(number)
        return context.unreadable.contain("job", number)

    rows = {row.id: row for row in load_rows(session, wanted, JobRow, JobRow.id, contain)}
    return {number: show(context, session, number, rows.get(number)) for number in unread or rows}


def show(context: Context, session: Session, number: int, row: JobRow | None) -> m.Job | None:
    """Return a job; if its row is None or does not convert, one that says so; None if even that cannot be read."""
    if row is not None:
        with context.unreadable.contain("job", number):
            return to_job(row, context.live.queue_positions)
    with context.unreadable.contain("job, also its plain columns,", number):
        return _unreadable(session, number)
    return None


def _unreadable(session: Session, number: int) -> m.Job:
    """Return what the plain columns tell of a job."""
    columns = (JobRow.name, JobRow.user, JobRow.state, JobRow.generation, JobRow.created_at)
    name, user, state, generation, created_at = session.execute(select(*columns).where(JobRow.id == number)).one()
    created = datetime.fromtimestamp(0, UTC)
    with suppress(ArithmeticError, OSError, TypeError, ValueError):
        created = to_datetime(created_at)
    return m.Job(
        id=number,
        name=name,
        user=user,
        # What is in no state that is known does not run: its team is ended.
        state=m.JobState(state) if state in set(m.JobState) else m.JobState.FAILED,
        reason=UNREADABLE,
        server_error=UNREADABLE,
        script="",
        arguments=(),
        devices="",
        priority=0,
        preemptible=False,
        max_time_s=None,
        max_restarts=0,
        generation=generation if isinstance(generation, int) else 0,
        allocation=(),
        exit_code=None,
        created_at=created,
        started_at=None,
        ended_at=None,
        progress=m.JobProgress(),
    )


def to_datetime(seconds: float) -> datetime:
    """Return a time that is given in seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC)
