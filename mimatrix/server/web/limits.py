"""Limits of what a request may send, of how long it may take for that, and of open connections."""

import asyncio
import resource
import time

from mimatrix.api.models import MAX_CODE_ARCHIVE_BYTES, MAX_DOCUMENT_BYTES, MAX_REPORT_BYTES
from mimatrix.server.errors import problem
from mimatrix.server.web.asgi import AsgiApp, AsgiMessage, Receive, Send

_CHUNK_S = 20.0
_BODY_S, _ARCHIVE_S = 60.0, 900.0
_MAX_BYTES = 4 << 20
_MAX_BYTES_OF = {
    "report": MAX_REPORT_BYTES,
    "join": MAX_REPORT_BYTES,
    "profile": MAX_DOCUMENT_BYTES,
    "plan": MAX_DOCUMENT_BYTES,
}
_WANTED_FILES = 65_536
_OWN_FILES = 256
"""Descriptors kept for the database, logs and supervisors."""


class BodyLimits:
    """Bodies have a maximum size, and must be there in time."""

    def __init__(
        self, app: AsgiApp, chunk_s: float = _CHUNK_S, body_s: float = _BODY_S, archive_s: float = _ARCHIVE_S
    ) -> None:
        self._app, self._chunk_s, self._body_s, self._archive_s = app, chunk_s, body_s, archive_s

    async def __call__(self, scope: AsgiMessage, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive, max_bytes(scope["path"]), self._chunk_s, self._seconds(scope["path"]))

        async def send_unless_refused(message: AsgiMessage) -> None:
            # What reads the body answers an error in its own words; ours follow below.
            if body.refusal is None:
                await send(message)

        try:
            await self._app(scope, body.receive, send_unless_refused)
        except OSError:
            if body.refusal is None:
                raise
        if body.refusal is not None:
            answer = problem(*body.refusal)
            answer.headers["Connection"] = "close"
            await answer(scope, receive, send)

    def _seconds(self, path: str) -> float:
        return self._archive_s if _is_archive(path) else self._body_s


class _Body:
    """The body of one request, as far as it was received."""

    def __init__(self, receive: Receive, most: int, chunk_s: float, body_s: float) -> None:
        self._receive, self._most, self._chunk_s = receive, most, chunk_s
        self._deadline_s = time.monotonic() + body_s
        self._bytes = 0
        self._is_complete = False
        self.refusal: tuple[int, str] | None = None

    async def receive(self) -> AsgiMessage:
        """Return the next part, or raise OSError if it is too late or too large."""
        if self._is_complete:
            return await self._receive()  # waits for the client to disconnect, for as long as the answer takes
        left_s = min(self._chunk_s, self._deadline_s - time.monotonic())
        try:
            message = await asyncio.wait_for(self._receive(), max(0.0, left_s))
        except TimeoutError:
            self.refusal = (408, "the body did not arrive in time; send it faster")
            raise OSError("too slow") from None
        self._bytes += len(message.get("body", b""))
        self._is_complete = not message.get("more_body", False)
        if self._bytes > self._most:
            self.refusal = (413, f"the body is larger than {self._most} bytes; send less")
            raise OSError("too large")
        return message


def max_bytes(path: str) -> int:
    """Return how many bytes a request to this path may have."""
    return MAX_CODE_ARCHIVE_BYTES if _is_archive(path) else _MAX_BYTES_OF.get(path.rpartition("/")[2], _MAX_BYTES)


def _is_archive(path: str) -> bool:
    return path.startswith("/api/code-archives/")


def raise_file_limit() -> int:
    """Raise the soft limit of open files as far as that is allowed, and return how many connections fit below it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    files = _WANTED_FILES if soft == resource.RLIM_INFINITY else soft
    return max(files - _OWN_FILES, files // 2)
