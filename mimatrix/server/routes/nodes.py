"""Nodes and their devices, as they are now."""

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial

from fastapi import APIRouter
from sqlalchemy import select

from mimatrix.api import models as m
from mimatrix.server.auth.dependencies import AnyUser, Shared
from mimatrix.server.db.models import AllocationRow, JobRow, NodeRow
from mimatrix.server.db.unreadable import load_rows
from mimatrix.server.jobs.lifecycle import ACTIVE_STATES
from mimatrix.server.metrics.live_state import reports_by_device

router = APIRouter(prefix="/api", tags=["nodes"])
_SILENT_S = 30.0


@router.get("/nodes")
def list_nodes(shared: Shared, _: AnyUser) -> list[m.NodeStatus]:
    """List the nodes with their devices, and the job that holds each device."""
    with shared.sessions() as session:
        contain = partial(shared.unreadable.contain, "node")
        rows = load_rows(session, select(NodeRow).order_by(NodeRow.name), NodeRow, NodeRow.name, contain)
        is_held = (AllocationRow.ended_at.is_(None), JobRow.state.in_(ACTIVE_STATES))
        active = select(AllocationRow.device, AllocationRow.job).join(JobRow).where(*is_held).order_by(AllocationRow.id)
        holder = {held.device: held.job for held in session.execute(active)}
    reports = reports_by_device(shared.live.all(), shared.clock())
    nodes = []
    for row in rows:
        with contain(row.name):
            nodes.append(_node(row, holder, reports, shared.clock()))
    return nodes


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
