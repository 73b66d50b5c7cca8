"""Jobs, as people hand them in, look at them and end them."""

from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from mimatrix.api import models as m
from mimatrix.core.errors import UserError
from mimatrix.scheduler import Start
from mimatrix.server.auth.dependencies import AnyUser, Shared, Submitter, check_owner
from mimatrix.server.auth.tokens import Bearer
from mimatrix.server.context import Context, team_name
from mimatrix.server.db.models import EventRow, JobRow, StintRow
from mimatrix.server.errors import ApiError
from mimatrix.server.jobs.lifecycle import WAITING, is_active, move, note

router = APIRouter(prefix="/api", tags=["jobs"])
Number = Annotated[int, Path(ge=1, le=(1 << 53))]
DigestPath = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$")]


@router.head("/code-archives/{digest}", status_code=200, response_class=Response)
def has_code_archive(digest: DigestPath, shared: Shared, _: Submitter) -> Response:
    """Whether an archive was uploaded already."""
    if shared.code_archives.path(digest) is None:
        raise ApiError(404, "it was not uploaded yet; put it here")
    return Response(status_code=200)


@router.put(
    "/code-archives/{digest}",
    status_code=204,
    response_class=Response,
    openapi_extra={
        "requestBody": {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
    },
)
async def upload(digest: DigestPath, request: Request, shared: Shared, _: Submitter) -> Response:
    """Store the archive of a script's folder."""
    await shared.code_archives.store(digest, request.stream())
    return Response(status_code=204)


@router.post("/jobs", status_code=201)
def submit(said: m.Submission, shared: Shared, who: Submitter) -> m.Job:
    """Hand a job in."""
    if shared.code_archives.path(said.code_archive) is None:
        raise ApiError(409, "the folder of the script was not uploaded; put it to /api/code-archives first")
    now_s = shared.clock()
    with shared.sessions.begin() as session:
        job = row_of(said, who.user, now_s)
        session.add(job)
        session.flush()
        note(session, job, f"handed in by {who.user}", now_s)
    shared.wake.set()
    return shown(job)


@router.post("/jobs/dry-run")
def would(said: m.Submission, request: Request, who: Submitter, shared: Shared) -> m.DryRunResult:
    """What would become of a job now."""
    job = row_of(said, who.user, shared.clock())
    job.id = 0
    found = request.app.state.loop.would(job)
    return m.DryRunResult(starts=isinstance(found, Start), reason=found.reason.replace("job 0", "it"))


@router.get("/jobs")
def jobs(
    shared: Shared,
    _: AnyUser,
    before: Annotated[int | None, Query(ge=1, le=(1 << 53))] = None,
    most: Annotated[int, Query(ge=1, le=1000)] = 50,
    state: Annotated[list[m.JobState] | None, Query(max_length=20)] = None,
    user: Annotated[str, Query(max_length=100)] = "",
) -> m.Jobs:
    """A page of jobs, the newest first."""
    wanted: list[ColumnElement[bool]] = [JobRow.state.in_(state)] if state else []
    wanted += [JobRow.user == user] if user else []
    newer = [JobRow.id < before] if before else []
    with shared.sessions() as session:
        page = list(session.scalars(select(JobRow).where(*wanted, *newer).order_by(JobRow.id.desc()).limit(most)))
        more = _count(session, *wanted, JobRow.id < page[-1].id) if len(page) == most else 0
    listed = tuple(shown(row, shared.live.places) for row in page)
    return m.Jobs(jobs=listed, next_before=page[-1].id if more else None, more=more)


@router.get("/jobs/{number}")
def job(number: Number, shared: Shared, _: AnyUser) -> m.Job:
    """One of them."""
    with shared.sessions() as session:
        row = found(session, number)
        more = {"last_seats": _last_seats(session, row), "has_plan": _has_plan(session, number)}
        return shown(row, shared.live.places).model_copy(update=more)


@router.get("/jobs/{number}/events")
def events(number: Number, shared: Shared, _: AnyUser) -> list[m.Event]:
    """All that happened to it, in order."""
    with shared.sessions() as session:
        found(session, number)
        wanted = (EventRow.id, EventRow.at, EventRow.state, EventRow.generation, EventRow.reason)
        rows = session.execute(select(*wanted).where(EventRow.job == number).order_by(EventRow.id))
        return [
            m.Event(
                id=row.id, at=_time(row.at), state=m.JobState(row.state), generation=row.generation, reason=row.reason
            )
            for row in rows
        ]


@router.get("/jobs/{number}/log")
def log(
    number: Number,
    shared: Shared,
    _: AnyUser,
    rank: Annotated[int, Query(ge=0, le=100_000)] = 0,
    offset: Annotated[int, Query(ge=-(1 << 53), le=(1 << 53))] = 0,
    generation: Annotated[int | None, Query(ge=1, le=1_000_000)] = None,
) -> m.Log:
    """Output of a rank from `offset` on; below 0 counted from its end."""
    with shared.sessions() as session:
        row = found(session, number)
    wanted = row.generation if generation is None else generation
    has_ended = row.state in m.ENDED or wanted < row.generation
    if row.seats and rank >= len(row.seats):
        raise ApiError(404, f"job {number} has ranks 0 to {len(row.seats) - 1}; ask for one of them")
    try:
        part = shared.launcher.read_log(team_name(number, wanted), rank, offset)
    except UserError:
        # Not started yet, or forgotten since: there is nothing to read.
        return m.Log(generation=wanted, text="", next_offset=max(0, offset), has_ended=has_ended)
    text, left = _whole(_from_character(part.data) if offset < 0 else part.data)
    return m.Log(generation=wanted, text=text, next_offset=part.next_offset - left, has_ended=has_ended)


@router.patch("/jobs/{number}")
def change(number: Number, said: m.JobUpdate, shared: Shared, who: Submitter) -> m.Job:
    """Another priority."""
    with shared.sessions.begin() as session:
        row = _own(session, number, who)
        if row.state in m.ENDED:
            raise ApiError(409, f"job {number} is {row.state}; it has no more use for a priority")
        row.priority = said.priority
        note(session, row, f"priority {said.priority}, by {who.user}", shared.clock())
    shared.wake.set()
    return shown(row)


@router.post("/jobs/{number}/cancel")
def cancel(number: Number, shared: Shared, who: Submitter) -> m.Job:
    """End it, wherever it is."""
    now_s = shared.clock()
    with shared.sessions.begin() as session:
        row = _own(session, number, who)
        if row.state in WAITING:
            move(session, row, m.JobState.CANCELLED, f"cancelled by {who.user}", now_s)
        elif is_active(row):
            row.leaving, row.leaving_at = "cancel", now_s
            note(session, row, f"told to end: cancelled by {who.user}", now_s)
        else:
            raise ApiError(409, f"job {number} is {row.state} already")
    shared.wake.set()
    return shown(row)


@router.post("/jobs/{number}/retry")
def retry(number: Number, shared: Shared, who: Submitter) -> m.Job:
    """Queue one that has ended once more; it goes on from its last checkpoint, if it left one."""
    with shared.sessions.begin() as session:
        row = _own(session, number, who)
        if row.state not in m.ENDED:
            raise ApiError(409, f"job {number} is {row.state}; only a job that has ended can be tried again")
        _check_code_archive(shared, row)
        row.retried = 0
        move(session, row, m.JobState.QUEUED, f"tried again by {who.user}", shared.clock())
    shared.wake.set()
    return shown(row)


def row_of(said: m.Submission, user: str, now_s: float) -> JobRow:
    """A job as it is written down first."""
    return JobRow(
        name=said.name,
        user=user,
        state=m.JobState.QUEUED,
        reason="",
        script=said.script,
        arguments=list(said.arguments),
        environment=dict(said.environment),
        snapshot=said.code_archive,
        devices=said.devices,
        priority=said.priority,
        preemptible=said.preemptible,
        max_time_s=said.max_time_s,
        retries=said.retries,
        retried=0,
        generation=0,
        seats=[],
        leaving="",
        created_at=now_s,
        waiting_since=now_s,
        progress={},
    )


def found(session: Session, number: int, *, to_change: bool = False) -> JobRow:
    """The job of that number, or a refusal; `to_change`: nobody else changes it meanwhile."""
    row = session.get(JobRow, number, with_for_update=to_change)
    if row is None:
        raise ApiError(404, f"there is no job {number}; see mimatrix jobs")
    return row


def shown(row: JobRow, places: Mapping[int, int] = MappingProxyType({})) -> m.Job:
    """As people see it; `places` are those in the queue."""
    return m.Job(
        id=row.id,
        name=row.name,
        user=row.user,
        state=m.JobState(row.state),
        reason=row.reason,
        queue_position=places.get(row.id) if row.state in WAITING else None,
        script=row.script,
        arguments=tuple(row.arguments),
        devices=row.devices,
        priority=row.priority,
        preemptible=row.preemptible,
        max_time_s=row.max_time_s,
        retries=row.retries,
        generation=row.generation,
        seats=tuple(row.seats),
        exit_code=row.exit_code,
        created_at=_time(row.created_at),
        started_at=_time(row.started_at) if row.started_at else None,
        ended_at=_time(row.ended_at) if row.ended_at else None,
        progress=m.Progress.model_validate(row.progress),
    )


def _last_seats(session: Session, row: JobRow) -> tuple[str, ...]:
    """Of a job that was started and has none now."""
    if row.seats or not row.generation:
        return ()
    # They were written down in the order of ranks.
    asked = select(StintRow.seat).where(StintRow.job == row.id, StintRow.generation == row.generation)
    return tuple(session.scalars(asked.order_by(StintRow.id)))


def _has_plan(session: Session, number: int) -> bool:
    return bool(session.scalar(select(JobRow.plan.is_not(None)).where(JobRow.id == number)))


def _whole(data: bytes) -> tuple[str, int]:
    """As text, and how many bytes at its end are only the beginning of a character: they come with the next piece."""
    for left in range(min(4, len(data))):
        if left == 0 or data[-left] & 0xC0 == 0xC0:
            try:
                return data[: len(data) - left].decode(), left
            except UnicodeDecodeError:
                continue
    return data.decode(errors="replace"), 0


def _from_character(data: bytes) -> bytes:
    """Without the end of a character whose beginning was not read."""
    return data.lstrip(bytes(range(0x80, 0xC0)))


def _count(session: Session, *wanted: ColumnElement[bool]) -> int:
    return session.scalar(select(func.count(JobRow.id)).where(*wanted)) or 0


def _own(session: Session, number: int, who: Bearer) -> JobRow:
    row = found(session, number, to_change=True)
    check_owner(row, who)
    return row


def _check_code_archive(shared: Context, row: JobRow) -> None:
    if shared.code_archives.path(row.snapshot) is None:
        raise ApiError(409, "its code archive is gone; submit it again")


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
