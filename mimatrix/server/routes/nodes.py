"""Nodes and their devices, as they are now."""

from collections.abc import Mapping
from datetime import UTC, datetime

from fastapi import APIRouter
from sqlalchemy import select

from mimatrix.api import models as m
from mimatrix.server.auth.dependencies import AnyUser, Shared
from mimatrix.server.db.models import JobRow, NodeRow
from mimatrix.server.jobs.lifecycle import ACTIVE_STATES
from mimatrix.server.metrics.live_state import reports_by_device

router = APIRouter(prefix="/api", tags=["nodes"])
_SILENT_S = 30.0


@router.get("/nodes")
def list_nodes(shared: Shared, _: AnyUser) -> list[m.NodeStatus]:
    """List the nodes with their devices, and the job that holds each device."""
    with shared.sessions() as session:
        rows = list(session.scalars(select(NodeRow).order_by(NodeRow.name)))
        active = session.execute(select(JobRow.id, JobRow.allocation).where(JobRow.state.in_(ACTIVE_STATES)))
        holder = {device: number for number, devices in active for device in devices}
    reports = reports_by_device(shared.live.all(), shared.clock())
    return [_node(row, holder, reports, shared.clock()) for row in rows]


def _node(row: NodeRow, holder: Mapping[str, int], reports: Mapping[str, m.Report], now_s: float) -> m.NodeStatus:
    names = [f"{row.name}/{number}" for number in range(len(row.devices["devices"]))]
    devices = tuple(
        _device(name, facts, holder.get(name), reports.get(name))
        for name, facts in zip(names, row.devices["devices"], strict=True)
    )
    traffic = (reports[name].traffic for name in names if name in reports)
    return m.NodeStatus(
        name=row.name,
        address=row.address,
        rack=row.rack,
        answers=now_s - row.seen_at < _SILENT_S,
        seen_at=datetime.fromtimestamp(row.seen_at, UTC),
        devices=devices,
        traffic=next(filter(None, traffic), None),
    )


def _device(name: str, facts: Mapping[str, object], job: int | None, report: m.Report | None) -> m.DeviceStatus:
    return m.DeviceStatus.model_validate(
        {
            "name": name,
            "kind": facts["kind"],
            "memory_bytes": facts["memory_bytes"],
            "job": job,
            "use": report.use if report else None,
            "moved_bytes_per_s": report.moved_bytes / report.step_s if report and report.step_s else None,
        }
    )
