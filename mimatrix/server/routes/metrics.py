"""What people look at: ranks as they are now, how it went, who used what."""

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Response
from fastapi.responses import PlainTextResponse
from sqlalchemy import select

from mimatrix.api import models as m
from mimatrix.server.auth.dependencies import AnyUser, Shared
from mimatrix.server.db.models import JobRow, AllocationRow
from mimatrix.server.errors import ApiError
from mimatrix.server.metrics import device_usage, store
from mimatrix.server.metrics.prometheus import CONTENT_TYPE, exposition
from mimatrix.server.jobs.service import find_job
from mimatrix.server.routes.jobs import Number

router = APIRouter(tags=["seeing"])
_HOUR_S = 3600.0
Since = Annotated[float | None, Query(ge=0, le=1e11)]
Points = Annotated[int, Query(ge=2, le=1000)]
Hours = Annotated[float, Query(gt=0, le=24 * 62)]
NodePath = Annotated[str, Path(min_length=1, max_length=200)]
DeviceNumber = Annotated[int, Path(ge=0, le=100_000)]


@router.get("/api/me")
def me(who: AnyUser) -> m.WhoAmI:
    """Whose token this is."""
    return m.WhoAmI(user=who.user, role=who.role)


@router.get("/api/jobs/{number}/ranks")
def ranks(number: Number, shared: Shared, _: AnyUser) -> m.Ranks:
    """What the ranks of a job that runs said last, and who holds the others up."""
    with shared.sessions() as session:
        row = find_job(session, number)
    live = shared.live.get(number, row.generation)
    if live is None:
        return m.Ranks(ranks=(), stragglers=())
    return m.Ranks(
        ranks=tuple(
            m.Rank(
                rank=rank,
                seat=live.devices[rank],
                at=_time(live.last_seen(rank)),
                step=said.step,
                step_s=said.step_s,
                compute_s=said.compute_s,
                data_s=said.data_s,
                waiting_s=said.waiting_s,
                communication_s=said.communication_s,
                samples=said.samples,
                planned_s=said.planned_s,
                use=said.use,
                group=said.group,
                samples_per_s=said.samples_per_s,
                pushed=said.pushed,
            )
            for rank, said in live.reports.items()
            if rank < live.ranks and rank not in live.lost_ranks
        ),
        stragglers=live.stragglers,
    )


@router.get("/api/jobs/{number}/history")
def history(
    number: Number,
    shared: Shared,
    _: AnyUser,
    since: Since = None,
    points: Points = 300,
    ranks: Literal["all", "last"] = "all",
) -> m.History:
    """How a job went, from a time on (seconds since 1970) or its start; with ranks in all points, or in the last."""
    with shared.sessions() as session:
        row = find_job(session, number)
        since_s = since if since is not None else row.started_at or row.created_at
        until_s = row.ended_at or shared.clock()
        begin_s, now_s = min(since_s, until_s), shared.clock()
        every_s, rows = store.read(session, number, begin_s, now_s, points, only_last_ranks=ranks == "last")
    return m.History(every_s=every_s, points=tuple(map(_point, rows)))


@router.get("/api/jobs/{number}/plan")
def plan(number: Number, shared: Shared, _: AnyUser) -> m.JsonDocument:
    """The plan that it runs by."""
    with shared.sessions() as session:
        content = find_job(session, number).plan
    if content is None:
        raise ApiError(404, f'job {number} has no plan; one is made by mimatrix.init(..., plan="profile")')
    return m.JsonDocument(content=content)


@router.get("/api/jobs/{number}/checkpoints")
def checkpoints(number: Number, shared: Shared, _: AnyUser) -> list[m.Checkpoint]:
    """What it has saved, the newest first."""
    with shared.sessions() as session:
        return [m.Checkpoint.model_validate(each) for each in find_job(session, number).checkpoints]


@router.get("/api/use")
def use(shared: Shared, _: AnyUser, hours: Hours = 24.0, points: Points = 300) -> list[m.ClusterPoint]:
    """How much of the cluster was used."""
    now_s = shared.clock()
    with shared.sessions() as session:
        _every_s, rows = store.read(session, store.CLUSTER, now_s - hours * _HOUR_S, now_s, points)
    return [m.ClusterPoint(at=_time(point.at), **point.figures) for point in rows]


@router.get("/api/devices/{node}/{number}")
def device(node: NodePath, number: DeviceNumber, shared: Shared, _: AnyUser) -> m.DeviceHistory:
    """Who used a device, the newest first."""
    seat = f"{node}/{number}"
    asked = select(AllocationRow, JobRow).join(JobRow).where(AllocationRow.seat == seat).order_by(AllocationRow.id.desc()).limit(100)
    with shared.sessions() as session:
        rows = list(session.execute(asked))
    return m.DeviceHistory(
        seat=seat,
        jobs=tuple(
            m.DeviceJob(
                id=row.id,
                name=row.name,
                user=row.user,
                state=m.JobState(row.state),
                started_at=_time(stint.started_at),
                ended_at=_time(stint.ended_at) if stint.ended_at else None,
            )
            for stint, row in rows
        ),
    )


@router.get("/api/devices/{node}/{number}/use")
def use_of_device(
    node: NodePath, number: DeviceNumber, shared: Shared, _: AnyUser, hours: Hours = 24.0, points: Points = 300
) -> list[m.DevicePoint]:
    """How a device was used, as the jobs that had it told."""
    now_s = shared.clock()
    with shared.sessions() as session:
        rows = device_usage.read(session, f"{node}/{number}", now_s - hours * _HOUR_S, now_s, points)
    return [m.DevicePoint(at=_time(point.at), **point.figures) for point in rows]


@router.get(
    "/metrics",
    response_class=PlainTextResponse,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
def metrics(shared: Shared, _: AnyUser) -> Response:
    """Figures for Prometheus."""
    return Response(exposition(shared), media_type=CONTENT_TYPE)


def _point(point: store.Point) -> m.Point:
    figures = point.figures
    return m.Point(
        at=_time(point.at),
        step=figures.get("step") or 0,
        samples_per_s=figures.get("samples_per_s"),
        step_s=figures.get("step_s"),
        predicted_step_s=figures.get("predicted_step_s"),
        metrics=figures.get("metrics") or {},
        ranks=figures.get("ranks") or {},
    )


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
