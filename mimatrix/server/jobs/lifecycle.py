"""The life of a job: which state may follow which, and the one function that moves a job and writes that down."""

from sqlalchemy import update
from sqlalchemy.orm import Session

from mimatrix.api.models import ACTIVE, ENDED, JobState
from mimatrix.server.db.models import EventRow, JobRow, StintRow

_S = JobState
_ENDS = frozenset({_S.DONE, _S.FAILED, _S.CANCELLED})
MOVES: dict[JobState, frozenset[JobState]] = {
    _S.QUEUED: frozenset({_S.STARTING, _S.CANCELLED, _S.FAILED}),
    _S.STARTING: frozenset({_S.PROFILING, _S.TRAINING, _S.SAVING, _S.PREEMPTED, _S.QUEUED}) | _ENDS,
    _S.PROFILING: frozenset({_S.TRAINING, _S.SAVING, _S.PREEMPTED, _S.QUEUED}) | _ENDS,
    _S.TRAINING: frozenset({_S.PROFILING, _S.SAVING, _S.PREEMPTED, _S.QUEUED}) | _ENDS,
    _S.SAVING: frozenset({_S.TRAINING, _S.PREEMPTED, _S.QUEUED}) | _ENDS,
    # In line again, as a queued one is.
    _S.PREEMPTED: frozenset({_S.STARTING, _S.CANCELLED, _S.FAILED}),
    # By `retry`.
    _S.FAILED: frozenset({_S.QUEUED}),
    _S.CANCELLED: frozenset({_S.QUEUED}),
    _S.DONE: frozenset({_S.QUEUED}),
}
WAITING = (_S.QUEUED, _S.PREEMPTED)


def may_move(old: JobState, new: JobState) -> bool:
    """Whether `new` may follow `old`."""
    return new in MOVES[old]


def move(session: Session, job: JobRow, new: JobState, reason: str, now_s: float) -> None:
    """Row and event together, in the session's transaction."""
    old = JobState(job.state)
    assert may_move(old, new), f"job {job.id} cannot go from {old} to {new}"
    job.state, job.reason = new, reason
    if new is _S.STARTING:
        job.generation += 1
        job.started_at, job.ended_at, job.exit_code = now_s, None, None
        session.add_all(
            StintRow(seat=seat, job=job.id, generation=job.generation, started_at=now_s) for seat in job.seats
        )
    if new in WAITING:
        job.waiting_since = now_s
    if new in WAITING or new in ENDED:
        session.execute(
            update(StintRow).where(StintRow.job == job.id, StintRow.ended_at.is_(None)).values(ended_at=now_s)
        )
        job.seats, job.leaving, job.leaving_at = [], "", None
    if new in ENDED:
        job.ended_at = now_s
    note(session, job, reason, now_s)


def note(session: Session, job: JobRow, reason: str, now_s: float) -> None:
    """Something happened that moves nothing."""
    session.add(EventRow(job=job.id, at=now_s, state=job.state, generation=job.generation, reason=reason))


def is_active(job: JobRow) -> bool:
    """Whether it has devices."""
    return JobState(job.state) in ACTIVE
