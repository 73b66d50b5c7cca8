"""Health checks, for load balancers and supervisors of processes."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from mimatrix.server.auth.dependencies import Shared
from mimatrix.server.errors import ApiError

router = APIRouter(tags=["health"])
_STALLED_S = 30.0


class Health(BaseModel):
    """The server is healthy."""

    status: Literal["ok"] = "ok"


@router.get("/healthz")
def healthz() -> Health:
    """Check that the server answers."""
    return Health()


@router.get("/readyz")
def readyz(shared: Shared) -> Health:
    """Check that the database answers and that the controller makes progress."""
    try:
        with shared.sessions() as session:
            session.execute(text("SELECT 1"))
    except SQLAlchemyError:
        raise ApiError(503, "the database does not answer; see the server's log") from None
    stalled_s = shared.monotonic() - shared.controller_turned_at_s
    if stalled_s > _STALLED_S:
        raise ApiError(503, f"the controller has not completed a turn for {stalled_s:.0f} s; see the server's log")
    return Health()
