"""Authentication before a request's body is read: a client without a valid token costs a header and nothing else."""

import logging
import time
from collections.abc import Callable

from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from mimatrix.server.auth.tokens import Authenticator, Bearer
from mimatrix.server.db.engine import DATABASE_UNAVAILABLE
from mimatrix.server.errors import ApiError, database_unavailable, problem
from mimatrix.server.web.asgi import AsgiApp, AsgiMessage, Receive, Send

_SCHEME = "bearer "
_LOG_INTERVAL_S = 60.0
logger = logging.getLogger(__name__)


class AuthenticateFirst:
    """Finds the bearer of every request below /api and to /metrics; refuses those without a valid token at once."""

    def __init__(self, app: AsgiApp, authenticator: Authenticator, clock: Callable[[], float] = time.monotonic) -> None:
        self._app, self._authenticator, self._clock = app, authenticator, clock
        self._logged_at = float("-inf")
        self._since_logged = 0

    async def __call__(self, scope: AsgiMessage, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http" and needs_token(scope["path"]):
            try:
                scope["bearer"] = await self._bearer(scope)
            except ApiError as error:
                self._count_refusal(scope)
                await _refuse(problem(error.status, str(error)), scope, receive, send)
                return
            except DATABASE_UNAVAILABLE as error:
                await _refuse(database_unavailable(error), scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _bearer(self, scope: AsgiMessage) -> Bearer:
        secret, authenticator = _secret(scope), self._authenticator
        if not secret:
            raise ApiError(401, "a token is needed; set MIMATRIX_TOKEN to that of `mimatrix up`")
        bearer = authenticator.cached(secret)
        if bearer:
            return bearer
        # A valid token is accepted even while others guess from the same address.
        address = scope["client"][0] if scope.get("client") else ""
        was_throttled = authenticator.is_throttled(address)
        bearer = await run_in_threadpool(authenticator.authenticate, secret, address)
        if bearer is None and was_throttled:
            raise ApiError(429, "too many wrong tokens came from this address; try again in a minute")
        if bearer is None:
            raise ApiError(401, "this token is not known; set MIMATRIX_TOKEN to that of `mimatrix up`")
        return bearer

    def _count_refusal(self, scope: AsgiMessage) -> None:
        """Count it, and log at most one line per minute: every client that reaches the port can cause these."""
        self._authenticator.refusals += 1
        self._since_logged += 1
        if self._clock() - self._logged_at < _LOG_INTERVAL_S:
            return
        address = scope["client"][0] if scope.get("client") else "an unknown address"
        logger.warning("%d requests without a valid token, the last from %s", self._since_logged, address)
        self._logged_at, self._since_logged = self._clock(), 0


async def _refuse(answer: JSONResponse, scope: AsgiMessage, receive: Receive, send: Send) -> None:
    # The body was not read, so the connection cannot carry another request.
    answer.headers["Connection"] = "close"
    await answer(scope, receive, send)


def needs_token(path: str) -> bool:
    """Return whether a path is for bearers of tokens only; pages and health checks hold no data."""
    return path.startswith("/api/") or path in ("/api", "/metrics")


def _secret(scope: AsgiMessage) -> str:
    given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
    return given[len(_SCHEME) :].strip() if given[: len(_SCHEME)].lower() == _SCHEME else ""
