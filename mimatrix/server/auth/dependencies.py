"""Authorization: every route names the roles that it is for."""

from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer

from mimatrix.api.models import Role
from mimatrix.server.auth.tokens import Bearer
from mimatrix.server.context import Context
from mimatrix.server.db.models import JobRow
from mimatrix.server.errors import ApiError

USERS = (Role.ADMIN, Role.USER, Role.VIEWER)
SUBMITTERS = (Role.ADMIN, Role.USER)
_scheme = HTTPBearer(auto_error=False, description="A token, as `mimatrix tokens add` prints it")


def context_of(request: Request) -> Context:
    """Return the context of the server that handles a request."""
    context: Context = request.app.state.context
    return context


Shared = Annotated[Context, Depends(context_of)]


class RequireRole:
    """Accepts bearers of these roles. The bearer was found before, by `AuthenticateFirst`."""

    def __init__(self, *roles: Role) -> None:
        self.roles = roles

    async def __call__(self, request: Request, _: Annotated[object, Security(_scheme)]) -> Bearer:
        """Return the bearer of the request.

        Raises:
            ApiError: The bearer has another role.
        """
        bearer: Bearer | None = request.scope.get("bearer")
        if bearer is None:
            raise ApiError(401, "a token is needed; set MIMATRIX_TOKEN to that of `mimatrix up`")
        if bearer.role not in self.roles:
            roles = " or ".join(self.roles)
            raise ApiError(403, f"the role {bearer.role} does not allow this; ask a user with the role {roles}")
        return bearer


AnyUser = Annotated[Bearer, Depends(RequireRole(*USERS))]
Submitter = Annotated[Bearer, Depends(RequireRole(*SUBMITTERS))]
Admin = Annotated[Bearer, Depends(RequireRole(Role.ADMIN))]
Worker = Annotated[Bearer, Depends(RequireRole(Role.WORKER))]


def check_owner(job: JobRow, who: Bearer) -> None:
    """Refuse a user who is neither the owner of a job nor an admin."""
    if who.role is not Role.ADMIN and job.user != who.user:
        raise ApiError(403, f"job {job.id} belongs to {job.user}; ask its owner or an admin")
