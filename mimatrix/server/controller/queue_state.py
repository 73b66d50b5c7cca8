"""The scheduler's view of the database: queued and running jobs as values, each read by itself."""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager

from sqlalchemy import select
from sqlalchemy.orm import Session

from mimatrix.api.models import JobState
from mimatrix.core.resources import ResourceRequest
from mimatrix.scheduler import DeviceSlot, Queued, Running, StopKind
from mimatrix.server.controller.nodes import slot_named
from mimatrix.server.controller.speeds import Speeds
from mimatrix.server.db.models import AllocationRow, JobRow
from mimatrix.server.db.unreadable import load_rows

Instant = Callable[[str, int, float], float]
"""Returns the time of something stored: what it is, of which job, its wall time."""
Contain = Callable[[int], AbstractContextManager[None]]
"""Contains exceptions of one job."""


def load_jobs(session: Session, states: Collection[JobState], contain: Contain) -> list[JobRow]:
    """Read jobs in these states. If one row cannot be read, each is read by itself, and that one left out."""
    wanted = select(JobRow).where(JobRow.state.in_(states)).order_by(JobRow.id)
    return load_rows(session, wanted, JobRow, JobRow.id, contain)


def queued_of(row: JobRow, speeds: Speeds, instant: Instant) -> Queued:
    """Return a waiting job as the scheduler sees it."""
    request = ResourceRequest.parse(row.devices)
    since_s = instant("submitted", row.id, row.submitted_at)
    known = speeds.get((row.user, row.name), {})
    return Queued(row.id, request, row.user, row.priority, since_s, row.max_time_s, known)


def running_of(row: JobRow, slots: Mapping[str, DeviceSlot], instant: Instant) -> Running:
    """Return an active job as the scheduler sees it."""
    return Running(
        row.id,
        tuple(slot_named(name, slots) for name in row.allocation),
        row.user,
        row.priority,
        instant("started", row.id, row.started_at or 0.0),
        row.max_time_s,
        row.preemptible,
        bool(row.stop_kind),
        not row.stop_kind or StopKind(row.stop_kind).saves,
    )


def unreadable_running(session: Session, job: int, slots: Mapping[str, DeviceSlot]) -> Running:
    """Return an active job whose row cannot be used: its devices, by what was allocated, are not free."""
    held = (AllocationRow.job == job, AllocationRow.ended_at.is_(None))
    return stopping(job, tuple(session.scalars(select(AllocationRow.device).where(*held))), slots)


def stopping(job: int, devices: Collection[str], slots: Mapping[str, DeviceSlot]) -> Running:
    """Return a team that is being ended: its devices are not free yet."""
    return Running(job, tuple(slot_named(name, slots) for name in devices), is_leaving=True, saves=False)
