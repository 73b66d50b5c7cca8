"""Error answers: problem+json (RFC 9457) with one sentence and the fix."""

import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from mimatrix.api.models import ProblemDetails
from mimatrix.core.errors import UserError, WorldError
from mimatrix.server.db.engine import DATABASE_UNAVAILABLE

logger = logging.getLogger(__name__)


class ApiError(UserError):
    """A request that is refused, with its HTTP status."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def problem(status: int, detail: str) -> JSONResponse:
    """Return an error answer."""
    body = ProblemDetails(title=HTTPStatus(status).phrase, status=status, detail=detail)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return JSONResponse(body.model_dump(), status, headers, media_type="application/problem+json")


def database_unavailable(error: Exception) -> JSONResponse:
    """Return the answer to a request that needs the database while it does not answer."""
    logger.warning("the database does not answer (%s)", str(error).partition("\n")[0])
    return problem(503, "the database does not answer; try again later, or see the server's log")


def install(app: FastAPI) -> None:
    """Answer every error of the application as a problem."""

    async def refused(_: Request, error: Exception) -> JSONResponse:
        return problem(error.status if isinstance(error, ApiError) else 400, str(error))

    async def unavailable(_: Request, error: Exception) -> JSONResponse:
        return problem(503, str(error))

    async def without_database(_: Request, error: Exception) -> JSONResponse:
        return database_unavailable(error)

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return problem(422, _sentence(error.errors()))

    async def other(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return problem(error.status_code, f"{error.detail}; see /docs for what there is")

    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        return problem(500, f"internal error ({type(error).__name__}); see the server's log")

    app.add_exception_handler(Exception, unexpected)
    app.add_exception_handler(UserError, refused)
    app.add_exception_handler(WorldError, unavailable)
    for kind in DATABASE_UNAVAILABLE:
        app.add_exception_handler(kind, without_database)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, other)


def _sentence(errors: Sequence[Any]) -> str:
    """Describe the first thing that is wrong: where it is, and what is valid."""
    first = errors[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body") or "the body"
    said = str(first["msg"]).removeprefix("Value error, ")
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    begin = said[:1].lower() if said[1:2].islower() else said[:1]  # "JSON decode error" keeps its capitals
    return f"{place}: {begin}{said[1:]}{more}; see /docs for the format"
