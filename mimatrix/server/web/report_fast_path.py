"""A short way for reports: nine in ten requests are one, and routing and dependencies take twice as long as the rest.

It takes what is in order and nothing else: whatever is unusual goes the long way, which has the words for it.
"""

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from pydantic import ValidationError

from mimatrix.api.models import Report, ReportReply, Role
from mimatrix.server.context import Context
from mimatrix.server.errors import ApiError
from mimatrix.server.routes.workers import take_report

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
_PATH = re.compile(r"/api/jobs/([1-9]\d{0,8})/report")
_BEARER = b"Bearer "


class ReportFastPath:
    """In front of the application."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]], context: Context) -> None:
        self._app, self._context = app, context

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request."""
        is_report = scope["type"] == "http" and scope["method"] == "POST" and _PATH.fullmatch(scope["path"])
        if not is_report:
            await self._app(scope, receive, send)
            return
        first = await receive()
        orders = None if first.get("more_body") else self._orders(int(is_report[1]), scope, first.get("body", b""))
        if orders is None:
            await self._app(scope, _again(first, receive), send)
            return
        content = orders.model_dump_json().encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    def _orders(self, number: int, scope: Message, body: bytes) -> ReportReply | None:
        """The answer to a report in order."""
        headers = dict(scope["headers"])
        given, kind = headers.get(b"authorization", b""), headers.get(b"content-type", b"")
        if not given.startswith(_BEARER) or kind != b"application/json":
            return None
        who = self._context.authenticator.cached(given[len(_BEARER) :].decode("latin-1"))
        if who is None or who.role is not Role.WORKER:
            return None
        try:
            return take_report(number, Report.model_validate_json(body), self._context, who)
        except (ApiError, ValidationError):
            return None


def _again(first: Message, receive: Receive) -> Receive:
    """All that came, from its beginning."""
    is_told = False

    async def repeated() -> Message:
        nonlocal is_told
        if is_told:
            return await receive()
        is_told = True
        return first

    return repeated
