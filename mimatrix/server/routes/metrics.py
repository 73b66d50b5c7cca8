"""Metrics of jobs: ranks as they are now, history, plan and checkpoints; and all metrics for Prometheus."""

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response
from fastapi.responses import PlainTextResponse

from mimatrix.api import models as m
from mimatrix.server.auth.dependencies import AnyUser, Shared
from mimatrix.server.errors import ApiError
from mimatrix.server.jobs.service import find_job
from mimatrix.server.metrics import store
from mimatrix.server.metrics.live_state import LiveJob
from mimatrix.server.metrics.prometheus import CONTENT_TYPE, exposition
from mimatrix.server.routes.jobs import JobId

router = APIRouter(tags=["metrics"])
HOUR_S = 3600.0
Since = Annotated[float | None, Query(ge=0, le=1e11)]
Points = Annotated[int, Query(ge=2, le=1000)]
Hours = Annotated[float, Query(gt=0, le=24 * 62)]


@router.get("/api/jobs/{number}/ranks")
def get_ranks(number: JobId, shared: Shared, _: AnyUser) -> m.Ranks:
    """Get the last reports of a running job's ranks, and its stragglers."""
    with shared.sessions() as session:
        row = find_job(session, number)
    live = shared.live.get(number, row.generation)
    if live is None:
        return m.Ranks(ranks=(), stragglers=())
    reports = live.reports.items()
    ranks = (_rank(live, rank, report) for rank, report in reports if rank < live.ranks and rank not in live.lost_ranks)
    return m.Ranks(ranks=tuple(ranks), stragglers=live.stragglers)


@router.get("/api/jobs/{number}/history")
def get_history(
    number: JobId,
    shared: Shared,
    _: AnyUser,
    since: Since = None,
    points: Points = 300,
    ranks: Literal["all", "last"] = "all",
) -> m.History:
    """Get a job's metrics over time, since its start or since a time (seconds since 1970).

    Metrics of ranks come with all points, or only with the last one.
    """
    with shared.sessions() as session:
        row = find_job(session, number)
        since_s = since if since is not None else row.started_at or row.created_at
        until_s = row.ended_at or shared.clock()
        begin_s, now_s = min(since_s, until_s), shared.clock()
        every_s, rows = store.read(session, number, begin_s, now_s, points, only_last_ranks=ranks == "last")
    return m.History(every_s=every_s, points=tuple(map(_point, rows)))


@router.get("/api/jobs/{number}/plan")
def get_plan(number: JobId, shared: Shared, _: AnyUser) -> m.JsonDocument:
    """Get the plan of a job."""
    with shared.sessions() as session:
        content = find_job(session, number).plan
    if content is None:
        raise ApiError(404, f'job {number} has no plan; one is made by mimatrix.init(..., plan="profile")')
    return m.JsonDocument(content=content)


@router.get("/api/jobs/{number}/checkpoints")
def list_checkpoints(number: JobId, shared: Shared, _: AnyUser) -> list[m.Checkpoint]:
    """List the checkpoints of a job, the newest first."""
    with shared.sessions() as session:
        return [m.Checkpoint.model_validate(saved) for saved in find_job(session, number).checkpoints]


@router.get(
    "/metrics",
    response_class=PlainTextResponse,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
def get_metrics(shared: Shared, _: AnyUser) -> Response:
    """Get all metrics in the format of Prometheus."""
    return Response(exposition(shared), media_type=CONTENT_TYPE)


def to_datetime(seconds: float) -> datetime:
    """Return a time that is given in seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC)


_RANK_FIELDS = m.Report.model_fields.keys() & m.Rank.model_fields.keys()


def _rank(live: LiveJob, rank: int, report: m.Report) -> m.Rank:
    shared = {name: getattr(report, name) for name in _RANK_FIELDS}
    return m.Rank(**shared, device=live.devices[rank], at=to_datetime(live.last_seen(rank)))


def _point(point: store.StoredPoint) -> m.Point:
    figures = point.figures
    return m.Point(
        at=to_datetime(point.at),
        step=figures.get("step") or 0,
        samples_per_s=figures.get("samples_per_s"),
        step_s=figures.get("step_s"),
        predicted_step_s=figures.get("predicted_step_s"),
        metrics=figures.get("metrics") or {},
        ranks=figures.get("ranks") or {},
    )
