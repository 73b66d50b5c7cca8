"""The audit log: which user changed what, or tried to."""

import logging

from fastapi.concurrency import run_in_threadpool

from mimatrix.api.models import Role
from mimatrix.server.auth.tokens import Bearer
from mimatrix.server.context import Context
from mimatrix.server.db.engine import DATABASE_UNAVAILABLE
from mimatrix.server.db.models import AuditRow
from mimatrix.server.web.asgi import AsgiApp, AsgiMessage, Receive, Send

logger = logging.getLogger(__name__)
_CHANGES = ("POST", "PUT", "PATCH", "DELETE")


class Audit:
    """Records changes by users. Reports of workers are not changes; requests without a valid token are only counted."""

    def __init__(self, app: AsgiApp, context: Context) -> None:
        self._app, self._context = app, context

    async def __call__(self, scope: AsgiMessage, receive: Receive, send: Send) -> None:
        """Handle one request."""
        bearer = scope.get("bearer")
        if bearer is None or bearer.role is Role.WORKER or scope["method"] not in _CHANGES:
            await self._app(scope, receive, send)
            return
        status = 500

        async def send_and_note(message: AsgiMessage) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        await self._app(scope, receive, send_and_note)
        try:
            await run_in_threadpool(self._write, scope, bearer, status)
        except DATABASE_UNAVAILABLE:
            # The request has its answer.
            logger.exception("the audit log lacks %s %s by %s", scope["method"], scope["path"], bearer.user)

    def _write(self, scope: AsgiMessage, bearer: Bearer, status: int) -> None:
        client = scope.get("client")
        with self._context.sessions.begin(durable=False) as session:
            session.add(
                AuditRow(
                    at=self._context.clock(),
                    user=bearer.user,
                    role=bearer.role,
                    action=f"{scope['method']} {scope['path']}"[:200],
                    status=status,
                    address=client[0] if client else "",
                )
            )
