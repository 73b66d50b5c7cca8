"""A TCP connection as a stream of bytes, with deadlines: a peer that is gone or stopped is noticed within seconds."""

import hashlib
import hmac
import select
import socket
import time

import torch

from mimatrix.core.framing import FrameFormat

FRAMES = FrameFormat(b"MMH3", max_payload_bytes=1 << 40)
"""The magic ends with the version of the protocol."""
GREETING_S = 5.0
"""A client shows the secret, and a server answers, within this time."""
SILENCE_S = 8.0
"""A peer that owes bytes and sends none within this time is lost; a busy server sends heartbeats."""
_PROBE_S, _PROBES = 2, 3
_CHUNK_BYTES = 1 << 18
"""Sent at once; on a slow link each chunk has the whole of `SILENCE_S`."""
_FIRST_BYTES = 1 << 26
"""Memory for the start of a payload; it grows with what arrives."""


def make_greeting(token: str) -> bytes:
    """Return the first bytes of a client: always as many, so that a server reads no more before it knows them."""
    return FRAMES.magic + hashlib.sha256(b"mimatrix shard server\0" + token.encode()).digest()


def shows_secret(raw: socket.socket, token: str, within_s: float = GREETING_S) -> bool:
    """Read the greeting of a client and return whether it knows the secret; nothing else is read.

    Raises:
        OSError: The client is gone, or the greeting was not complete in time.
    """
    expected, received, deadline = make_greeting(token), b"", time.monotonic() + within_s
    while len(received) < len(expected) and expected.startswith(received[: len(FRAMES.magic)]):
        raw.settimeout(max(0.001, deadline - time.monotonic()))
        part = raw.recv(len(expected) - len(received))
        if not part:
            raise ConnectionError("the client closed the connection before it showed the secret")
        received += part
    return hmac.compare_digest(received, expected)


class ByteStream:
    """The socket of a connection. Every wait for a peer that owes bytes ends after `silence_s`."""

    def __init__(self, raw: socket.socket, silence_s: float) -> None:
        self._raw, self._silence_s = raw, silence_s
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # A host that lost power or its cable answers no probe; a server that is only busy does, since its kernel does.
        for option, value in (
            (socket.TCP_KEEPIDLE, _PROBE_S),
            (socket.TCP_KEEPINTVL, _PROBE_S),
            (socket.TCP_KEEPCNT, _PROBES),
            (socket.TCP_USER_TIMEOUT, int(1000 * SILENCE_S)),
        ):
            raw.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, data: bytes | memoryview) -> None:
        """Send all of `data`; a `TimeoutError` says that the peer does not read."""
        view = memoryview(data)
        for start in range(0, len(view), _CHUNK_BYTES):
            self._raw.settimeout(self._silence_s)
            self._raw.sendall(view[start : start + _CHUNK_BYTES])

    def send_at_once(self, data: bytes) -> None:
        """Send a few bytes if that does not block; if only some of them fit, the stream is broken and is shut down."""
        poll = select.poll()
        poll.register(self._raw, select.POLLOUT)
        if poll.poll(0) and self._raw.send(data, socket.MSG_DONTWAIT) < len(data):
            self.shut_down()

    def receive(self, count: int, first_s: float | None) -> bytearray:
        """Return the next `count` bytes.

        Args:
            count: How many bytes; the caller has checked that they are few.
            first_s: How long to wait for the first of them; None: for as long as the peer's host is there.
        """
        data = bytearray(count)
        view, done = memoryview(data), 0
        while done < count:
            done += self._receive_into(view[done:], self._silence_s if done else first_s)
        return data

    def receive_tensor(self, count: int) -> torch.Tensor:
        """Return the next `count` bytes as a tensor, in memory that grows with what has arrived."""
        values, done = torch.empty(min(count, _FIRST_BYTES), dtype=torch.uint8), 0
        while done < count:
            if done == len(values):
                longer = torch.empty(min(count, 2 * done), dtype=torch.uint8)
                longer[:done] = values
                values = longer
            done += self._receive_into(values.numpy().data[done:], self._silence_s)
        return values

    def shut_down(self) -> None:
        """Wake up every thread that waits for the peer, and let the peer know."""
        self._raw.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._raw.close()

    def _receive_into(self, view: memoryview, within_s: float | None) -> int:
        self._raw.settimeout(within_s)
        try:
            received = self._raw.recv_into(view)
        except TimeoutError as error:
            if within_s is None or error.errno:
                raise
            raise TimeoutError(f"the peer has sent nothing for {within_s:.3g} s") from None
        if not received:
            raise ConnectionError("the peer closed the connection")
        return received
