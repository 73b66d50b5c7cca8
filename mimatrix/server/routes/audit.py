"""The audit log."""

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel
from sqlalchemy import select

from mimatrix.server.auth.dependencies import Admin, Shared
from mimatrix.server.db.models import AuditRow

router = APIRouter(prefix="/api", tags=["audit"])


class AuditEntry(BaseModel):
    """One request that changed something, or tried to."""

    id: int
    at: datetime
    user: str
    role: str
    action: str
    status: int
    address: str


@router.get("/audit")
def list_audit_entries(
    shared: Shared,
    _: Admin,
    before: Annotated[int | None, Query(ge=1, le=(1 << 53))] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> list[AuditEntry]:
    """List which user changed what, the newest first."""
    query = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit)
    query = query.where(AuditRow.id < before) if before else query
    with shared.sessions() as session:
        return [
            AuditEntry(
                id=row.id,
                at=datetime.fromtimestamp(row.at, UTC),
                user=row.user,
                role=row.role,
                action=row.action,
                status=row.status,
                address=row.address,
            )
            for row in session.scalars(query)
        ]
