"""API tokens of users."""

from typing import Annotated

from fastapi import APIRouter, Path, Response
from sqlalchemy import select

from mimatrix.api import models as m
from mimatrix.server.auth.dependencies import Admin, AnyUser, Shared
from mimatrix.server.auth.tokens import issue
from mimatrix.server.db.models import TokenRow
from mimatrix.server.errors import ApiError

router = APIRouter(prefix="/api", tags=["tokens"])
TokenId = Annotated[int, Path(ge=1, le=(1 << 53))]


@router.get("/me")
def whoami(who: AnyUser) -> m.WhoAmI:
    """Get the user and the role of the token that is sent."""
    return m.WhoAmI(user=who.user, role=who.role)


@router.get("/tokens")
def list_tokens(shared: Shared, _: Admin) -> list[m.Token]:
    """List the tokens of users, without their secrets."""
    with shared.sessions() as session:
        rows = session.scalars(
            select(TokenRow).where(TokenRow.ended_at.is_(None), TokenRow.job.is_(None)).order_by(TokenRow.id)
        )
        return [m.Token(id=row.id, user=row.user, role=m.Role(row.role)) for row in rows]


@router.post("/tokens", status_code=201)
def create_token(wanted: m.TokenCreate, shared: Shared, _: Admin) -> m.Token:
    """Create a token. Only this answer has its secret."""
    if wanted.role is m.Role.WORKER:
        raise ApiError(422, "workers get their tokens with their jobs; choose admin, user or viewer")
    with shared.sessions.begin() as session:
        row, secret = issue(session, wanted.user, wanted.role, shared.clock())
    return m.Token(id=row.id, user=row.user, role=wanted.role, secret=secret)


@router.delete("/tokens/{number}", status_code=204, response_class=Response)
def revoke_token(number: TokenId, shared: Shared, who: Admin) -> Response:
    """Revoke a token."""
    if number == who.token:
        raise ApiError(409, "this is the token that you use; revoke it with another one")
    with shared.sessions.begin() as session:
        row = session.get(TokenRow, number)
        if row is None or row.ended_at is not None:
            raise ApiError(404, f"there is no token {number}; see mimatrix tokens")
        row.ended_at = shared.clock()
    shared.authenticator.clear()
    return Response(status_code=204)
