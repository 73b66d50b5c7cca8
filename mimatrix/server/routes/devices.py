"""Devices over time: the jobs that held them, and how much they were used."""

from typing import Annotated

from fastapi import APIRouter, Path
from sqlalchemy import select

from mimatrix.api import models as m
from mimatrix.server.auth.dependencies import AnyUser, Shared
from mimatrix.server.db.models import AllocationRow, JobRow
from mimatrix.server.metrics import device_usage, store
from mimatrix.server.routes.metrics import HOUR_S, Hours, Points, to_datetime

router = APIRouter(prefix="/api", tags=["devices"])
_MAX_JOBS = 100
NodePath = Annotated[str, Path(min_length=1, max_length=200)]
DeviceNumber = Annotated[int, Path(ge=0, le=100_000)]


@router.get("/usage")
def get_cluster_usage(shared: Shared, _: AnyUser, hours: Hours = 24.0, points: Points = 300) -> list[m.ClusterPoint]:
    """Get how many devices of the cluster were used over time."""
    now_s = shared.clock()
    with shared.sessions() as session:
        _every_s, rows = store.read(session, store.CLUSTER, now_s - hours * HOUR_S, now_s, points)
    return [m.ClusterPoint(at=to_datetime(point.at), **point.figures) for point in rows]


@router.get("/devices/{node}/{number}")
def get_device_history(node: NodePath, number: DeviceNumber, shared: Shared, _: AnyUser) -> m.DeviceHistory:
    """List the jobs that held a device, the newest first."""
    device = f"{node}/{number}"
    query = (
        select(AllocationRow, JobRow.name, JobRow.user, JobRow.state)
        .join(JobRow)
        .where(AllocationRow.device == device)
        .order_by(AllocationRow.id.desc())
    )
    with shared.sessions() as session:
        rows = list(session.execute(query.limit(_MAX_JOBS)))
    jobs = []
    for allocation, name, user, state in rows:
        with shared.unreadable.contain("allocation", allocation.id):
            jobs.append(_job_on_device(allocation, name, user, state))
    return m.DeviceHistory(device=device, jobs=tuple(jobs))


@router.get("/devices/{node}/{number}/usage")
def get_device_usage(
    node: NodePath, number: DeviceNumber, shared: Shared, _: AnyUser, hours: Hours = 24.0, points: Points = 300
) -> list[m.DevicePoint]:
    """Get how much a device was used over time, as reported by the jobs that held it."""
    now_s = shared.clock()
    with shared.sessions() as session:
        rows = device_usage.read(session, f"{node}/{number}", now_s - hours * HOUR_S, now_s, points)
    return [m.DevicePoint(at=to_datetime(point.at), **point.figures) for point in rows]


def _job_on_device(allocation: AllocationRow, name: str, user: str, state: str) -> m.DeviceJob:
    return m.DeviceJob(
        id=allocation.job,
        name=name,
        user=user,
        state=m.JobState(state),
        started_at=to_datetime(allocation.started_at),
        ended_at=to_datetime(allocation.ended_at) if allocation.ended_at else None,
    )
