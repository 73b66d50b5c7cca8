"""Jobs: submit, list, change and cancel them, and read their logs."""

from functools import partial
from pathlib import PurePath
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from mimatrix.api import models as m
from mimatrix.core.errors import UserError
from mimatrix.scheduler import Start
from mimatrix.scheduler.reasons import to_json
from mimatrix.server.auth.dependencies import AnyUser, Shared, Submitter
from mimatrix.server.context import Context, team_name
from mimatrix.server.db.models import AllocationRow, EventRow, JobRow
from mimatrix.server.db.unreadable import load_rows
from mimatrix.server.errors import ApiError
from mimatrix.server.jobs import service
from mimatrix.server.jobs.lifecycle import state_of
from mimatrix.server.jobs.service import UnreadableJobError, find_job, no_such_job
from mimatrix.server.jobs.views import load_page, show, to_datetime

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
async def upload_code_archive(digest: DigestPath, request: Request, shared: Shared, who: Submitter) -> Response:
    """Upload a code archive: the directory of a script as .tar.gz, named by its SHA-256."""
    await run_in_threadpool(service.check_upload, shared, digest, who)
    await shared.code_archives.store(digest, request.stream())
    await run_in_threadpool(service.record_upload, shared, digest, who)
    return Response(status_code=204)


@router.post("/jobs", status_code=201)
def submit(said: m.Submission, shared: Shared, who: Submitter) -> m.Job:
    """Submit a job."""
    row = service.submit(shared, said, who)
    return _shown(shared, row.id, row)


@router.post("/jobs/dry-run")
def dry_run(said: m.Submission, request: Request, who: Submitter, shared: Shared) -> m.DryRunResult:
    """Return what the scheduler would do with a job if it were submitted now."""
    job = service.new_row(said, who.user, shared.clock())
    job.id = 0
    decision = request.app.state.controller.dry_run(job)
    starts, reason = isinstance(decision, Start), decision.reason
    return m.DryRunResult(starts=starts, reason=reason.describe(), reason_data=to_json(reason))


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
        page = load_page(shared, session, select(JobRow).where(*wanted, *newer).order_by(JobRow.id.desc()).limit(limit))
        last = min(page, default=0)
        more = _count(session, *wanted, JobRow.id < last) if len(page) == limit else 0
    return m.Jobs(jobs=tuple(filter(None, page.values())), next_before=last if more else None, more=more)


@router.get("/jobs/{number}")
def get_job(number: JobId, shared: Shared, _: AnyUser) -> m.Job:
    """Get a job."""
    with shared.sessions() as session:
        try:
            row = find_job(session, number)
        except UnreadableJobError:
            return _shown(shared, number, None)
        more: dict[str, Any] = {
            "last_allocation": _last_allocation(session, row),
            "has_plan": _has_plan(session, number),
        }
        with shared.unreadable.contain("checkpoints of job", number):
            more["resumes_from"] = _resumes_from(row)
    return _shown(shared, number, row).model_copy(update=more)


@router.get("/jobs/{number}/events")
def list_events(number: JobId, shared: Shared, _: AnyUser) -> list[m.Event]:
    """List the events of a job, the oldest first."""
    with shared.sessions() as session:
        if not _count(session, JobRow.id == number):
            raise no_such_job(number)
        contain = partial(shared.unreadable.contain, "event")
        wanted = select(EventRow).where(EventRow.job == number).order_by(EventRow.id)
        found = []
        for row in load_rows(session, wanted, EventRow, EventRow.id, contain):
            with contain(row.id):
                found.append(_event(row))
        return found


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
    has_ended = state_of(row).is_final or wanted < row.generation
    if row.allocation and rank >= len(row.allocation):
        raise ApiError(404, f"job {number} has ranks 0 to {len(row.allocation) - 1}; ask for one of them")
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
    return _shown(shared, number, service.change_priority(shared, number, said.priority, who))


@router.post("/jobs/{number}/cancel")
def cancel_job(number: JobId, shared: Shared, who: Submitter) -> m.Job:
    """Cancel a job, whatever its state."""
    return _shown(shared, number, service.cancel(shared, number, who))


@router.post("/jobs/{number}/retry")
def requeue_job(number: JobId, shared: Shared, who: Submitter) -> m.Job:
    """Requeue a job that has ended; it resumes from its last checkpoint, if it has one."""
    return _shown(shared, number, service.requeue(shared, number, who))


def _event(row: EventRow) -> m.Event:
    return m.Event(
        id=row.id,
        at=to_datetime(row.at),
        state=m.JobState(row.state),
        generation=row.generation,
        kind=m.EventKind(row.kind),
        reason=row.reason,
        data=row.data,
    )


def _shown(shared: Context, number: int, row: JobRow | None) -> m.Job:
    """Return a job, also one whose stored data cannot be read.

    Raises:
        ApiError: Nothing of it can be shown.
    """
    with shared.sessions() as session:
        job = show(shared, session, number, row)
    if job is None:
        raise UnreadableJobError(number)
    return job


def _last_allocation(session: Session, row: JobRow) -> tuple[str, ...]:
    """Return the devices that a job held last, if it holds none now."""
    if row.allocation or not row.generation:
        return ()
    # They were written down in the order of ranks.
    asked = select(AllocationRow.device).where(AllocationRow.job == row.id, AllocationRow.generation == row.generation)
    return tuple(session.scalars(asked.order_by(AllocationRow.id)))


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
