"""Close connections whose request header does not arrive in time: otherwise a client could occupy all connections."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 20.0
"""From the first byte of a header, or from the connection, to the last byte of the header."""


class HeaderTimeoutProtocol(H11Protocol):
    """The HTTP protocol of uvicorn with a deadline for headers; bodies have theirs in `limits.BodyLimits`."""

    head_s = HEAD_S
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the first header."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Handle a part of a request."""
        super().data_received(data)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the deadline."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._late is None:
            self._late = self.loop.call_later(self.head_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._late:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._late = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()
