"""The application: routes, what they refuse, and how much of anything they take."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool

from mimatrix import __version__
from mimatrix.api.models import MAX_CODE_ARCHIVE_BYTES, MAX_DOCUMENT_BYTES, MAX_REPORT_BYTES, Problem, Role
from mimatrix.server import errors
from mimatrix.server.context import Context
from mimatrix.server.controller.reconcile import Loop
from mimatrix.server.db.models import AuditRow
from mimatrix.server.routes import house, jobs, metrics, workers
from mimatrix.server.web import api_docs, static
from mimatrix.server.web.report_fast_path import ReportFastPath

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_SLOW_S = 20.0
_MOST_BYTES = 4 << 20
_LIMITS = {
    "report": MAX_REPORT_BYTES,
    "join": MAX_REPORT_BYTES,
    "profile": MAX_DOCUMENT_BYTES,
    "plan": MAX_DOCUMENT_BYTES,
}
_CHANGES = ("POST", "PUT", "PATCH", "DELETE")
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"description": said, "content": {"application/problem+json": {"schema": Problem.model_json_schema()}}}
    for status, said in (
        (400, "Bad request"),
        (401, "No token, or an unknown one"),
        (403, "Not allowed"),
        (404, "Not found"),
        (408, "Too slow"),
        (409, "Not now"),
        (413, "Too large"),
        (422, "Not understood"),
        (429, "Too many wrong tokens"),
        (503, "Not ready"),
    )
}


def create_app(context: Context, loop: Loop) -> FastAPI:
    """All of it."""
    app = FastAPI(
        title="MiMatrix job server",
        version=__version__,
        summary="Training jobs on clusters whose machines are not alike.",
        # Those of FastAPI fetch scripts from elsewhere, and are blank where there is no internet.
        docs_url=None,
        redoc_url=None,
        responses=_REFUSALS,
    )
    app.state.context, app.state.loop = context, loop
    errors.install(app)
    api_docs.install(app)
    static.install(app)
    for router in (jobs.router, metrics.router, workers.router, house.router):
        app.include_router(router)
    app.add_middleware(Audit, context=context)
    app.add_middleware(ReportFastPath, context=context)
    app.add_middleware(Bounds)
    return app


class Bounds:
    """Bodies have a most, and must come in time."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most, taken, refused = most_of(scope["path"]), 0, None

        async def bounded() -> MutableMapping[str, Any]:
            nonlocal taken, refused
            try:
                message = await asyncio.wait_for(receive(), _SLOW_S)
            except TimeoutError:
                refused = errors.problem(408, f"nothing came for {_SLOW_S:g} s; send the body faster")
                raise OSError("too slow") from None
            taken += len(message.get("body", b""))
            if taken > most:
                refused = errors.problem(413, f"the body is larger than {most} bytes; send less")
                raise OSError("too large")
            return message

        async def unless_refused(message: MutableMapping[str, Any]) -> None:
            # Whoever reads the body answers an error in their own words; ours are said below.
            if refused is None:
                await send(message)

        try:
            await self._app(scope, bounded, unless_refused)
        except OSError:
            if refused is None:
                raise
        if refused is not None:
            await refused(scope, receive, send)


def most_of(path: str) -> int:
    """How many bytes a request may have."""
    parts = path.strip("/").split("/")
    if parts[:2] == ["api", "code-archives"]:
        return MAX_CODE_ARCHIVE_BYTES
    return _LIMITS.get(parts[-1], _MOST_BYTES)


class Audit:
    """Writes down who changed what, and who tried to. Workers' reports are no changes."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], context: Context) -> None:
        self._app, self._context = app, context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or scope["method"] not in _CHANGES:
            await self._app(scope, receive, send)
            return
        status = 500

        async def noted(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        await self._app(scope, receive, noted)
        bearer = scope.get("bearer")
        if bearer is None or bearer.role is not Role.WORKER:
            await run_in_threadpool(self._write, scope, bearer, status)

    def _write(self, scope: Scope, bearer: Any, status: int) -> None:
        client = scope.get("client")
        with self._context.sessions.begin() as session:
            session.add(
                AuditRow(
                    at=self._context.clock(),
                    user=bearer.user if bearer else "",
                    role=bearer.role if bearer else "",
                    action=f"{scope['method']} {scope['path']}"[:200],
                    status=status,
                    address=client[0] if client else "",
                )
            )
