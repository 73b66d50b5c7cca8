"""What users may do with jobs: the rules of submitting, cancelling, requeueing and changing them."""

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from mimatrix.api.models import JobState, Role, Submission
from mimatrix.scheduler.reasons import StopKind, StopReason
from mimatrix.server.auth.dependencies import check_owner
from mimatrix.server.auth.tokens import Bearer
from mimatrix.server.context import Context
from mimatrix.server.db.engine import DATABASE_UNAVAILABLE
from mimatrix.server.db.models import CodeArchiveRow, JobRow, SubmissionKeyRow
from mimatrix.server.errors import ApiError
from mimatrix.server.jobs import events
from mimatrix.server.jobs.lifecycle import (
    UNREADABLE_GROUPS,
    WAITING_STATES,
    cancel_by_id,
    record_event,
    request_stop,
    state_of,
    transition,
)

_KEYS_KEPT_S = 86_400.0


class UnreadableJobError(ApiError):
    """The stored data of a job cannot be read."""

    def __init__(self, number: int) -> None:
        super().__init__(409, f"the stored data of job {number} cannot be read; cancel it, and submit it again")


def submit(context: Context, submission: Submission, who: Bearer) -> JobRow:
    """Queue a new job, or return that of an earlier submission with the same key.

    Raises:
        ApiError: Its code was not uploaded, or the user has too many jobs in the queue.
    """
    now_s = context.clock()
    with context.sessions.begin() as session:
        known = _job_of_key(session, submission.key, who, now_s)
        if known is not None:
            return known
        _check_code_archive(context, session, submission.code_archive)
        _check_queue_quota(context, session, who)
        job = new_row(submission, who.user, now_s)
        session.add(job)
        session.flush()
        if submission.key:
            session.add(SubmissionKeyRow(user=who.user, key=submission.key, job=job.id, at=now_s))
        record_event(session, job, events.submitted(who.user), now_s)
    context.wake.set()
    return job


def change_priority(context: Context, number: int, priority: int, who: Bearer) -> JobRow:
    """Change the priority of a job that has not ended."""
    with context.sessions.begin() as session:
        job = find_own_job(session, number, who)
        if state_of(job).is_final:
            raise ApiError(409, f"job {number} is {job.state}; only a job that has not ended has a priority")
        job.priority = priority
        record_event(session, job, events.priority_changed(who.user, priority), context.clock())
    context.wake.set()
    return job


def cancel(context: Context, number: int, who: Bearer) -> JobRow | None:
    """Cancel a job that waits, or have one that runs end; None if its row cannot be read."""
    now_s = context.clock()
    with context.sessions.begin() as session:
        try:
            job = _cancel(session, number, who, now_s)
        except (UnreadableJobError, ValueError):
            # ValueError: of a state that is none, before anything was changed.
            job = None
            _cancel_unreadable(session, number, who, now_s)
    context.wake.set()
    return job


def _cancel(session: Session, number: int, who: Bearer, now_s: float) -> JobRow:
    job = find_own_job(session, number, who)
    state = state_of(job)
    if state.is_waiting:
        transition(session, job, JobState.CANCELLED, events.cancelled(who.user), now_s)
    elif state.is_active:
        request_stop(session, job, StopReason(kind=StopKind.CANCEL, user=who.user), now_s)
    else:
        raise ApiError(409, f"job {number} is {job.state} already")
    return job


def _cancel_unreadable(session: Session, number: int, who: Bearer, now_s: float) -> None:
    """Cancel a job by its plain columns."""
    user, state = session.execute(select(JobRow.user, JobRow.state).where(JobRow.id == number)).one()
    check_owner(JobRow(id=number, user=user), who)
    if not cancel_by_id(session, number, who.user, now_s):
        raise ApiError(409, f"job {number} is {state} already")


def requeue(context: Context, number: int, who: Bearer) -> JobRow:
    """Queue a job again that has ended; it resumes from its last checkpoint, if it has one."""
    now_s = context.clock()
    with context.sessions.begin() as session:
        job = find_own_job(session, number, who)
        if not state_of(job).is_final:
            raise ApiError(409, f"job {number} is {job.state}; only a job that has ended can be queued again")
        if job.groups == UNREADABLE_GROUPS:
            raise ApiError(409, f"the groups of job {number} cannot be read; submit it again")
        _check_code_archive(context, session, job.code_archive, "its code archive is gone; submit it again")
        _check_queue_quota(context, session, who)
        job.restarts, job.start_failures, job.submitted_at = 0, 0, now_s
        transition(session, job, JobState.QUEUED, events.requeued(who.user), now_s)
    context.wake.set()
    return job


def check_upload(context: Context, digest: str, who: Bearer) -> None:
    """Refuse a new code archive of a user whose archives take too much room."""
    if who.role is Role.ADMIN or context.code_archives.path(digest):
        return
    with context.sessions() as session:
        used = session.scalar(select(func.sum(CodeArchiveRow.bytes)).where(CodeArchiveRow.user == who.user)) or 0
    limit = context.quotas.code_archive_bytes
    if used >= limit:
        raise ApiError(
            413,
            f"code archives of {who.user} take {used >> 20} MiB, and {limit >> 20} MiB are allowed; those of jobs that "
            "ended long ago are deleted by themselves, or ask an admin",
        )


def record_upload(context: Context, digest: str, who: Bearer) -> None:
    """Write down that an archive was uploaded, also if it was there already: it is kept for a while from now on."""
    with context.sessions.begin() as session:
        row = session.get(CodeArchiveRow, digest, with_for_update=True) or CodeArchiveRow(digest=digest, user=who.user)
        row.bytes, row.uploaded_at = context.code_archives.size(digest), context.clock()
        session.add(row)


def new_row(submission: Submission, user: str, now_s: float) -> JobRow:
    """Return the row of a new job."""
    return JobRow(
        name=submission.name,
        user=user,
        state=JobState.QUEUED,
        reason="",
        reason_data={},
        script=submission.script,
        arguments=list(submission.arguments),
        environment=dict(submission.environment),
        code_archive=submission.code_archive,
        devices=submission.devices,
        priority=submission.priority,
        preemptible=submission.preemptible,
        max_time_s=submission.max_time_s,
        max_restarts=submission.max_restarts,
        restarts=0,
        groups=[list(group) for group in submission.groups],
        generation=0,
        allocation=[],
        stop_kind="",
        server_error="",
        start_failures=0,
        created_at=now_s,
        submitted_at=now_s,
        waiting_since=now_s,
        progress={},
    )


def find_job(session: Session, number: int, *, to_change: bool = False) -> JobRow:
    """Return a job, locked if it is to be changed.

    Raises:
        ApiError: There is none of this number.
        UnreadableJobError: Its stored data cannot be read.
    """
    try:
        row = session.get(JobRow, number, with_for_update=to_change)
    except DATABASE_UNAVAILABLE:
        raise
    except Exception as error:
        raise UnreadableJobError(number) from error
    if row is None:
        raise no_such_job(number)
    return row


def no_such_job(number: int) -> ApiError:
    """Return the error that there is no job of this number."""
    return ApiError(404, f"there is no job {number}; see mimatrix jobs")


def find_own_job(session: Session, number: int, who: Bearer) -> JobRow:
    """Return a job that this user may change, locked."""
    row = find_job(session, number, to_change=True)
    check_owner(row, who)
    return row


def _check_code_archive(
    context: Context,
    session: Session,
    digest: str,
    otherwise: str = "the directory of the script was not uploaded; put it to /api/code-archives first",
) -> None:
    """Refuse a job without code. The archive's row is locked, so that it is not deleted at this moment."""
    session.get(CodeArchiveRow, digest, with_for_update=True)
    if context.code_archives.path(digest) is None:
        raise ApiError(409, otherwise)


def _check_queue_quota(context: Context, session: Session, who: Bearer) -> None:
    waiting = select(func.count(JobRow.id)).where(JobRow.user == who.user, JobRow.state.in_(WAITING_STATES))
    limit = context.quotas.queued_jobs
    if who.role is not Role.ADMIN and (session.scalar(waiting) or 0) >= limit:
        raise ApiError(409, f"{who.user} has {limit} jobs in the queue, which is the limit; wait, or cancel some")


def _job_of_key(session: Session, key: str, who: Bearer, now_s: float) -> JobRow | None:
    """Return the job that was submitted with a key recently."""
    if not key:
        return None
    session.execute(delete(SubmissionKeyRow).where(SubmissionKeyRow.at < now_s - _KEYS_KEPT_S))
    row = session.get(SubmissionKeyRow, (who.user, key))
    return session.get(JobRow, row.job) if row else None
