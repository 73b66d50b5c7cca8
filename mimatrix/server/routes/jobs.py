"""Jobs: submit, list, change and cancel them, and read their logs."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import PurePath
from types import MappingProxyType
from typing import Annotated, Any

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
JobId = Annotated[int, Path(ge=1, le=(1 << 53))]
DigestPath = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$")]


@router.head("/code-archives/{digest}", status_code=200, response_class=Response)
def check_code_archive(digest: DigestPath, shared: Shared, _: Submitter) -> Response:
    """Check whether a code archive is stored."""
    if shared.code_archives.path(digest) is None:
        raise ApiError(404, "this code archive is not stored yet; upload it with PUT")
    return Response(status_code=200)


@router.put(
    "/code-archives/{digest}",
    status_code=204,
    response_class=Response,
    openapi_extra={
        "requestBody": {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
    },
)
async def upload_code_archive(digest: DigestPath, request: Request, shared: Shared, _: Submitter) -> Response:
    """Upload a code archive: the directory of a script as .tar.gz, named by its SHA-256."""
    await shared.code_archives.store(digest, request.stream())
    return Response(status_code=204)


@router.post("/jobs", status_code=201)
def submit(said: m.Submission, shared: Shared, who: Submitter) -> m.Job:
    """Submit a job."""
    if shared.code_archives.path(said.code_archive) is None:
        raise ApiError(409, "the code archive is not stored; upload it to /api/code-archives first")
    now_s = shared.clock()
    with shared.sessions.begin() as session:
        job = row_of(said, who.user, now_s)
        session.add(job)
        session.flush()
        note(session, job, f"handed in by {who.user}", now_s)
    shared.wake.set()
    return to_job(job)


@router.post("/jobs/dry-run")
def dry_run(said: m.Submission, request: Request, who: Submitter, shared: Shared) -> m.DryRunResult:
    """Get what the scheduler would do with a job now, without submitting it."""
    job = row_of(said, who.user, shared.clock())
    job.id = 0
    found = request.app.state.loop.would(job)
    return m.DryRunResult(starts=isinstance(found, Start), reason=found.reason.replace("job 0", "it"))


@router.get("/jobs")
def list_jobs(
    shared: Shared,
    _: AnyUser,
    before: Annotated[int | None, Query(ge=1, le=(1 << 53))] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    state: Annotated[list[m.JobState] | None, Query(max_length=20)] = None,
    user: Annotated[str, Query(max_length=100)] = "",
) -> m.Jobs:
    """List jobs, the newest first, page by page."""
    wanted: list[ColumnElement[bool]] = [JobRow.state.in_(state)] if state else []
    wanted += [JobRow.user == user] if user else []
    newer = [JobRow.id < before] if before else []
    with shared.sessions() as session:
        page = list(session.scalars(select(JobRow).where(*wanted, *newer).order_by(JobRow.id.desc()).limit(limit)))
        more = _count(session, *wanted, JobRow.id < page[-1].id) if len(page) == limit else 0
    listed = tuple(to_job(row, shared.live.places) for row in page)
    return m.Jobs(jobs=listed, next_before=page[-1].id if more else None, more=more)


@router.get("/jobs/{number}")
def get_job(number: JobId, shared: Shared, _: AnyUser) -> m.Job:
    """Get a job."""
    with shared.sessions() as session:
        row = find_job(session, number)
        more: dict[str, Any] = {"last_seats": _last_seats(session, row), "has_plan": _has_plan(session, number)}
        more["resumes_from"] = _resumes_from(row)
        return to_job(row, shared.live.places).model_copy(update=more)


@router.get("/jobs/{number}/events")
def list_events(number: JobId, shared: Shared, _: AnyUser) -> list[m.Event]:
    """List the events of a job, the oldest first."""
    with shared.sessions() as session:
        find_job(session, number)
        wanted = (EventRow.id, EventRow.at, EventRow.state, EventRow.generation, EventRow.reason)
        rows = session.execute(select(*wanted).where(EventRow.job == number).order_by(EventRow.id))
        return [
            m.Event(
                id=row.id, at=_time(row.at), state=m.JobState(row.state), generation=row.generation, reason=row.reason
            )
            for row in rows
        ]


@router.get("/jobs/{number}/log")
def get_log(
    number: JobId,
    shared: Shared,
    _: AnyUser,
    rank: Annotated[int, Query(ge=0, le=100_000)] = 0,
    offset: Annotated[int, Query(ge=-(1 << 53), le=(1 << 53))] = 0,
    generation: Annotated[int | None, Query(ge=1, le=1_000_000)] = None,
) -> m.Log:
    """Get the output of a rank, from an offset in bytes; a negative one counts from the end."""
    with shared.sessions() as session:
        row = find_job(session, number)
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
def update_job(number: JobId, said: m.JobUpdate, shared: Shared, who: Submitter) -> m.Job:
    """Change a job's priority."""
    with shared.sessions.begin() as session:
        row = _own(session, number, who)
        if row.state in m.ENDED:
            raise ApiError(409, f"job {number} is {row.state}; only jobs that have not ended have a priority")
        row.priority = said.priority
        note(session, row, f"priority {said.priority}, by {who.user}", shared.clock())
    shared.wake.set()
    return to_job(row)


@router.post("/jobs/{number}/cancel")
def cancel_job(number: JobId, shared: Shared, who: Submitter) -> m.Job:
    """Cancel a job, whatever its state."""
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
    return to_job(row)


@router.post("/jobs/{number}/retry")
def requeue_job(number: JobId, shared: Shared, who: Submitter) -> m.Job:
    """Requeue a job that has ended; it resumes from its last checkpoint, if it has one."""
    with shared.sessions.begin() as session:
        row = _own(session, number, who)
        if row.state not in m.ENDED:
            raise ApiError(409, f"job {number} is {row.state}; only a job that has ended can be requeued")
        _require_code_archive(shared, row)
        row.retried = 0
        move(session, row, m.JobState.QUEUED, f"tried again by {who.user}", shared.clock())
    shared.wake.set()
    return to_job(row)


def row_of(said: m.Submission, user: str, now_s: float) -> JobRow:
    """Return the row of a new job."""
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


def find_job(session: Session, number: int, *, to_change: bool = False) -> JobRow:
    """Return a job's row; `to_change` locks it until the session ends.

    Raises:
        ApiError: There is no such job.
    """
    row = session.get(JobRow, number, with_for_update=to_change)
    if row is None:
        raise ApiError(404, f"there is no job {number}; see mimatrix jobs")
    return row


def to_job(row: JobRow, places: Mapping[int, int] = MappingProxyType({})) -> m.Job:
    """Return a job for the API; `places` are the positions in the queue."""
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
    """Return the devices that a job held last, if it holds none now."""
    if row.seats or not row.generation:
        return ()
    # They were written down in the order of ranks.
    asked = select(StintRow.seat).where(StintRow.job == row.id, StintRow.generation == row.generation)
    return tuple(session.scalars(asked.order_by(StintRow.id)))


def _resumes_from(row: JobRow) -> int | None:
    """Return the step of the newest checkpoint in the job's own directory, where a restart looks for it."""
    own = (saved for saved in row.checkpoints if PurePath(saved["path"]).parent.name == f"job-{row.id}")
    return next((int(saved["step"]) for saved in own), None)


def _has_plan(session: Session, number: int) -> bool:
    return bool(session.scalar(select(JobRow.plan.is_not(None)).where(JobRow.id == number)))


def _whole(data: bytes) -> tuple[str, int]:
    """Decode output; also return how many bytes at its end belong to a character that is not complete yet."""
    for left in range(min(4, len(data))):
        if left == 0 or data[-left] & 0xC0 == 0xC0:
            try:
                return data[: len(data) - left].decode(), left
            except UnicodeDecodeError:
                continue
    return data.decode(errors="replace"), 0


def _from_character(data: bytes) -> bytes:
    """Remove the end of a character whose beginning was not read."""
    return data.lstrip(bytes(range(0x80, 0xC0)))


def _count(session: Session, *wanted: ColumnElement[bool]) -> int:
    return session.scalar(select(func.count(JobRow.id)).where(*wanted)) or 0


def _own(session: Session, number: int, who: Bearer) -> JobRow:
    row = find_job(session, number, to_change=True)
    check_owner(row, who)
    return row


def _require_code_archive(shared: Context, row: JobRow) -> None:
    if shared.code_archives.path(row.snapshot) is None:
        raise ApiError(409, "its code archive is gone; submit it again")


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
