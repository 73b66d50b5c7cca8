"""The lifecycle of a job: which state may follow which, and the one function that changes a state and records it."""

import logging
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from mimatrix.api.models import JobState
from mimatrix.scheduler.reasons import StopKind, StopReason
from mimatrix.server.db.engine import DATABASE_UNAVAILABLE
from mimatrix.server.db.models import AllocationRow, EventRow, JobRow
from mimatrix.server.jobs.events import JobEvent, cancelled, stop_requested

logger = logging.getLogger(__name__)
_S = JobState
_ENDS = frozenset({_S.DONE, _S.FAILED, _S.CANCELLED})
TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    _S.QUEUED: frozenset({_S.STARTING, _S.CANCELLED, _S.FAILED}),
    _S.STARTING: frozenset({_S.PROFILING, _S.TRAINING, _S.SAVING, _S.PREEMPTED, _S.QUEUED}) | _ENDS,
    _S.PROFILING: frozenset({_S.TRAINING, _S.SAVING, _S.PREEMPTED, _S.QUEUED}) | _ENDS,
    _S.TRAINING: frozenset({_S.PROFILING, _S.SAVING, _S.PREEMPTED, _S.QUEUED}) | _ENDS,
    _S.SAVING: frozenset({_S.TRAINING, _S.PREEMPTED, _S.QUEUED}) | _ENDS,
    # In the queue again, as a queued one is.
    _S.PREEMPTED: frozenset({_S.STARTING, _S.CANCELLED, _S.FAILED}),
    # When a user requeues it.
    _S.FAILED: frozenset({_S.QUEUED}),
    _S.CANCELLED: frozenset({_S.QUEUED}),
    _S.DONE: frozenset({_S.QUEUED}),
}
ACTIVE_STATES = tuple(state for state in JobState if state.is_active)
WAITING_STATES = tuple(state for state in JobState if state.is_waiting)
"""For queries; a state by itself knows its group: `state.is_active`."""
UNREADABLE_GROUPS: list[list[int]] = [[]]
"""Written where stored groups cannot be read. No submission has these, and no job starts with them."""


def is_allowed(old: JobState, new: JobState) -> bool:
    """Whether `new` may follow `old`."""
    return new in TRANSITIONS[old]


def transition(session: Session, job: JobRow, new: JobState, event: JobEvent, now_s: float) -> None:
    """Change the state of a job and record the event, together in the session's transaction."""
    old = JobState(job.state)
    assert is_allowed(old, new), f"job {job.id} cannot go from {old} to {new}"
    job.state, job.reason, job.reason_data = new, event.sentence, {"kind": event.kind.value, **event.data}
    if new is _S.STARTING:
        _allocate(session, job, now_s)
    if new.is_waiting:
        job.waiting_since = now_s
    if not new.is_active:
        _release(session, job, now_s)
    if new.is_final:
        job.ended_at = now_s
    record_event(session, job, event, now_s)


def record_event(session: Session, job: JobRow, event: JobEvent, now_s: float) -> None:
    """Record something that happened to a job, without a change of its state."""
    session.add(
        EventRow(
            job=job.id,
            at=now_s,
            state=job.state,
            generation=job.generation,
            kind=event.kind,
            reason=event.sentence,
            data=event.data,
        )
    )


def request_stop(session: Session, job: JobRow, reason: StopReason, now_s: float) -> bool:
    """Tell an active job to stop, unless it was told to end already. One that saves can be told to end, too."""
    was_told = bool(job.stop_kind) and not StopKind(job.stop_kind).saves
    if not state_of(job).is_active or was_told or (job.stop_kind and reason.kind.saves):
        return False
    job.stop_kind, job.stop_requested_at = reason.kind.value, now_s
    record_event(session, job, stop_requested(reason), now_s)
    return True


def record_event_by_id(session: Session, job: int, event: JobEvent, now_s: float) -> None:
    """Record an event of a job whose row may be unreadable."""
    known = session.execute(select(JobRow.state, JobRow.generation).where(JobRow.id == job)).first()
    if known:
        state, generation = known
        columns = {"kind": event.kind, "reason": event.sentence, "data": event.data}
        session.add(EventRow(job=job, at=now_s, state=state, generation=generation, **columns))


def fail_by_id(session: Session, job: int, event: JobEvent, now_s: float) -> bool:
    """Let a job fail whose row may be unreadable; False if it has ended already."""
    state = session.scalar(select(JobRow.state).where(JobRow.id == job))
    if state is None or JobState(state).is_final:
        return False
    _end_by_id(session, job, JobState.FAILED, event, now_s)
    session.execute(update(JobRow).where(JobRow.id == job).values(server_error=event.sentence))
    return True


def cancel_by_id(session: Session, job: int, user: str, now_s: float) -> bool:
    """Cancel a job whose row is unreadable: one that runs is told to end. False if it has ended already."""
    state = session.scalar(select(JobRow.state).where(JobRow.id == job))
    if state in ACTIVE_STATES:
        reason = StopReason(kind=StopKind.CANCEL, user=user)
        told = update(JobRow).where(JobRow.id == job)
        session.execute(told.values(stop_kind=reason.kind.value, stop_requested_at=now_s))
        record_event_by_id(session, job, stop_requested(reason), now_s)
        return True
    if state in _ENDS:
        return False
    # It waits, or is in a state that is none.
    _end_by_id(session, job, JobState.CANCELLED, cancelled(user), now_s)
    return True


def _end_by_id(session: Session, job: int, state: JobState, event: JobEvent, now_s: float) -> None:
    released: dict[str, Any] = {
        "allocation": [],
        "groups": _groups_of(session, job),
        "stop_kind": "",
        "stop_requested_at": None,
    }
    reason = {"reason": event.sentence, "reason_data": {"kind": event.kind.value, **event.data}}
    ended = {"state": state.value, "ended_at": now_s}
    session.execute(update(JobRow).where(JobRow.id == job).values(**released, **reason, **ended))
    held = (AllocationRow.job == job, AllocationRow.ended_at.is_(None))
    session.execute(update(AllocationRow).where(*held).values(ended_at=now_s))
    record_event_by_id(session, job, event, now_s)


def _groups_of(session: Session, job: int) -> list[list[int]]:
    """Return the groups that a job was submitted with, or `UNREADABLE_GROUPS`."""
    try:
        groups = session.scalar(select(JobRow.groups).where(JobRow.id == job))
        if all(type(rank) is int for group in groups or () for rank in group):
            return [list(group) for group in groups or ()]
    except DATABASE_UNAVAILABLE:
        raise
    except Exception:
        logger.exception("job %d: its groups cannot be read", job)
    return UNREADABLE_GROUPS


def state_of(job: JobRow) -> JobState:
    """Return the state of a job as a value with predicates."""
    return JobState(job.state)


def _allocate(session: Session, job: JobRow, now_s: float) -> None:
    job.generation += 1
    job.started_at, job.ended_at, job.server_error = now_s, None, ""
    job.exit_code, job.exit_cause, job.failed_rank = None, None, None
    session.add_all(
        AllocationRow(device=device, job=job.id, generation=job.generation, started_at=now_s)
        for device in job.allocation
    )


def _release(session: Session, job: JobRow, now_s: float) -> None:
    """Give back its devices; written so that it also works where what is stored of them cannot be read."""
    held = (AllocationRow.job == job.id, AllocationRow.ended_at.is_(None))
    session.execute(update(AllocationRow).where(*held).values(ended_at=now_s))
    job.allocation, job.stop_kind, job.stop_requested_at = [], "", None
