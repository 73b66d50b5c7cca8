"""What the server answers when it says no: problem+json with one sentence and the fix."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from mimatrix.api.models import Problem
from mimatrix.core.errors import UserError, WorldError

_TITLES = {
    400: "Bad request",
    401: "Who are you?",
    403: "Not allowed",
    404: "Not found",
    405: "Not possible here",
    408: "Too slow",
    409: "Not now",
    413: "Too large",
    422: "Not understood",
    429: "Too often",
    503: "Not ready",
}


class ApiError(UserError):
    """Bad input, with the status that says so."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def problem(status: int, detail: str) -> JSONResponse:
    """The answer."""
    body = Problem(title=_TITLES.get(status, "Trouble"), status=status, detail=detail)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return JSONResponse(body.model_dump(), status, headers, media_type="application/problem+json")


def install(app: FastAPI) -> None:
    """Have the application answer so, whatever goes wrong."""

    async def refused(_: Request, error: Exception) -> JSONResponse:
        return problem(error.status if isinstance(error, ApiError) else 400, str(error))

    async def gave_way(_: Request, error: Exception) -> JSONResponse:
        return problem(503, str(error))

    async def misread(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return problem(422, _sentence(error.errors()))

    async def other(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return problem(error.status_code, f"{error.detail}; see /docs for what there is")

    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        return problem(500, f"the server made a mistake ({type(error).__name__}); its log says more")

    app.add_exception_handler(Exception, unexpected)
    app.add_exception_handler(UserError, refused)
    app.add_exception_handler(WorldError, gave_way)
    app.add_exception_handler(RequestValidationError, misread)
    app.add_exception_handler(HTTPException, other)


def _sentence(errors: Sequence[Any]) -> str:
    """The first thing that is wrong: where, and what was wanted."""
    first = errors[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body") or "the body"
    said = str(first["msg"]).removeprefix("Value error, ")
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{place}: {said[:1].lower()}{said[1:]}{more}; see /docs for the format"
