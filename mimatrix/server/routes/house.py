"""The house itself: nodes, tokens, the audit log, and whether it is well."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel
from sqlalchemy import select, text
from sqlalchemy.exc import SQLAlchemyError

from mimatrix.api import models as m
from mimatrix.server.auth.dependencies import Admin, AnyUser, Shared
from mimatrix.server.auth.tokens import issue
from mimatrix.server.db.models import AuditRow, JobRow, NodeRow, TokenRow
from mimatrix.server.errors import ApiError
from mimatrix.server.jobs.lifecycle import ACTIVE_STATES
from mimatrix.server.metrics.live_state import reports_by_device

router = APIRouter(tags=["house"])
_SILENT_S = 30.0


class Well(BaseModel):
    """All is well."""

    status: str = "ok"


class Entry(BaseModel):
    """Of the audit log."""

    id: int
    at: datetime
    user: str
    role: str
    action: str
    status: int
    address: str


@router.get("/healthz")
def healthz() -> Well:
    """Whether the server answers."""
    return Well()


@router.get("/readyz")
def readyz(shared: Shared) -> Well:
    """Whether its database does."""
    try:
        with shared.sessions() as session:
            session.execute(text("SELECT 1"))
    except SQLAlchemyError:
        raise ApiError(503, "the database does not answer; look at the server's log") from None
    return Well()


@router.get("/api/nodes")
def nodes(shared: Shared, _: AnyUser) -> list[m.Node]:
    """The machines, their devices, and who has them."""
    with shared.sessions() as session:
        rows = list(session.scalars(select(NodeRow).order_by(NodeRow.name)))
        active = session.execute(select(JobRow.id, JobRow.seats).where(JobRow.state.in_(ACTIVE_STATES)))
        holder = {seat: number for number, seats in active for seat in seats}
    said = reports_by_device(shared.live.all(), shared.clock())
    return [_node(row, holder, said, shared.clock()) for row in rows]


@router.get("/api/tokens")
def tokens(shared: Shared, _: Admin) -> list[m.Token]:
    """Those that people have. Secrets are not known here."""
    with shared.sessions() as session:
        rows = session.scalars(
            select(TokenRow).where(TokenRow.ended_at.is_(None), TokenRow.job.is_(None)).order_by(TokenRow.id)
        )
        return [m.Token(id=row.id, user=row.user, role=m.Role(row.role)) for row in rows]


@router.post("/api/tokens", status_code=201)
def create_token(said: m.TokenCreate, shared: Shared, _: Admin) -> m.Token:
    """A new one; its secret is shown this once."""
    if said.role is m.Role.WORKER:
        raise ApiError(422, "workers get their tokens with their jobs; choose admin, user or viewer")
    with shared.sessions.begin() as session:
        row, secret = issue(session, said.user, said.role, shared.clock())
    return m.Token(id=row.id, user=row.user, role=said.role, secret=secret)


@router.delete("/api/tokens/{number}", status_code=204, response_class=Response)
def revoke_token(number: Annotated[int, Path(ge=1, le=(1 << 53))], shared: Shared, who: Admin) -> Response:
    """Its bearer is let in no more."""
    if number == who.token:
        raise ApiError(409, "this is the token that you use; end it with another one")
    with shared.sessions.begin() as session:
        row = session.get(TokenRow, number)
        if row is None or row.ended_at is not None:
            raise ApiError(404, f"there is no token {number}; see mimatrix tokens")
        row.ended_at = shared.clock()
    shared.authenticator.clear()
    return Response(status_code=204)


@router.get("/api/audit")
def audit(
    shared: Shared,
    _: Admin,
    before: Annotated[int | None, Query(ge=1, le=(1 << 53))] = None,
    most: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> list[Entry]:
    """Who changed what, the newest first."""
    asked = select(AuditRow).order_by(AuditRow.id.desc()).limit(most)
    asked = asked.where(AuditRow.id < before) if before else asked
    with shared.sessions() as session:
        return [
            Entry(
                id=row.id,
                at=datetime.fromtimestamp(row.at, UTC),
                user=row.user,
                role=row.role,
                action=row.action,
                status=row.status,
                address=row.address,
            )
            for row in session.scalars(asked)
        ]


def _node(row: NodeRow, holder: dict[str, int], said: Mapping[str, m.Report], now_s: float) -> m.Node:
    seats = [f"{row.name}/{number}" for number in range(len(row.devices["devices"]))]
    devices = tuple(
        m.Device(
            name=seat,
            kind=each["kind"],
            memory_bytes=each["memory_bytes"],
            job=holder.get(seat),
            use=said[seat].use if seat in said else None,
            moved_bytes_per_s=_moved(said[seat]) if seat in said else None,
        )
        for seat, each in zip(seats, row.devices["devices"], strict=True)
    )
    told = (said[seat].traffic for seat in seats if seat in said)
    return m.Node(
        name=row.name,
        address=row.address,
        rack=row.near,
        answers=now_s - row.seen_at < _SILENT_S,
        seen_at=datetime.fromtimestamp(row.seen_at, UTC),
        devices=devices,
        traffic=next((each for each in told if each), None),
    )


def _moved(said: m.Report) -> float | None:
    return said.moved_bytes / said.step_s if said.step_s else None
