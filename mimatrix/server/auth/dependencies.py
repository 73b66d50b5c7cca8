"""Who may do what: every route names the roles that it is for."""

from typing import Annotated

from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from mimatrix.api.models import Role
from mimatrix.server.auth.tokens import Bearer
from mimatrix.server.context import Context
from mimatrix.server.db.models import JobRow
from mimatrix.server.errors import ApiError

USERS = (Role.ADMIN, Role.USER, Role.VIEWER)
SUBMITTERS = (Role.ADMIN, Role.USER)
_scheme = HTTPBearer(auto_error=False, description="A token, as mimatrix up printed it")


def context_of(request: Request) -> Context:
    """The server's."""
    found: Context = request.app.state.context
    return found


Shared = Annotated[Context, Depends(context_of)]


class RequireRole:
    """Lets bearers of these roles in."""

    def __init__(self, *roles: Role) -> None:
        self.roles = roles

    async def __call__(
        self, request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Depends(_scheme)]
    ) -> Bearer:
        """Who it is; a refusal for anybody else."""
        bearer = await _bearer(request, given.credentials if given else "")
        request.scope["bearer"] = bearer
        if bearer.role not in self.roles:
            raise ApiError(
                403, f"the role {bearer.role} may not do this; ask somebody who is {' or '.join(self.roles)}"
            )
        return bearer


async def _bearer(request: Request, secret: str) -> Bearer:
    authenticator = context_of(request).authenticator
    address = request.client.host if request.client else ""
    found = authenticator.cached(secret) if secret else None
    if found:
        return found
    if not secret:
        raise ApiError(401, "a token is needed; set MIMATRIX_TOKEN to what mimatrix up printed")
    # A right token is let in whoever else guesses from the same address.
    was_shut = authenticator.is_throttled(address)
    found = await run_in_threadpool(authenticator.authenticate, secret, address)
    if found is None and was_shut:
        raise ApiError(429, "too many wrong tokens came from this address; try again in a minute")
    if found is None:
        raise ApiError(401, "this token is not known here; set MIMATRIX_TOKEN to what mimatrix up printed")
    return found


AnyUser = Annotated[Bearer, Depends(RequireRole(*USERS))]
Submitter = Annotated[Bearer, Depends(RequireRole(*SUBMITTERS))]
Admin = Annotated[Bearer, Depends(RequireRole(Role.ADMIN))]
Worker = Annotated[Bearer, Depends(RequireRole(Role.WORKER))]


def check_owner(job: JobRow, who: Bearer) -> None:
    """Users see the jobs of others, and leave them alone."""
    if who.role is not Role.ADMIN and job.user != who.user:
        raise ApiError(403, f"job {job.id} belongs to {job.user}; ask them, or an admin")
