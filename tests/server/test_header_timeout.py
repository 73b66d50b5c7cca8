"""Connections without a whole request head are closed; slow heads that come in time, and idle ones, are not."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn

from mimatrix.server.web.header_timeout import HeaderTimeoutProtocol


class _Soon(HeaderTimeoutProtocol):
    head_s = 1.0


async def _app(scope: dict[str, object], receive: object, send: object) -> None:
    del receive
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": b"ok"})  # type: ignore[operator]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(_app, http=_Soon, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        deadline = time.monotonic() + 10
        while not server.started:
            assert time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.01)
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(timeout=10)


def _connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=5)


def _answer(wire: socket.socket) -> bytes:
    """Head and body, which may come in two parts."""
    answer = b""
    while not answer.endswith(b"ok"):
        part = wire.recv(1000)
        assert part, f"the connection was ended after {answer!r}"
        answer += part
    return answer


@pytest.mark.parametrize("said", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_half_a_head_is_not_waited_for(port: int, said: bytes) -> None:
    with _connected(port) as wire:
        began = time.monotonic()
        wire.sendall(said)
        assert wire.recv(100) == b""
        assert 0.8 < time.monotonic() - began < 5


def test_whoever_sends_byte_by_byte_has_no_more_time(port: int) -> None:
    def drip(wire: socket.socket) -> None:
        for _ in range(100):
            wire.sendall(b"X")
            time.sleep(0.05)

    with _connected(port) as wire, pytest.raises(OSError, match=r"pipe|reset"):
        drip(wire)


def test_slow_heads_that_come_in_time_and_idle_connections_stay(port: int) -> None:
    with _connected(port) as wire:
        for _ in range(2):
            wire.sendall(b"GET / HTTP/1.1\r\n")
            time.sleep(0.1)
            wire.sendall(b"Host: x\r\n\r\n")
            assert b"200" in _answer(wire)
            time.sleep(1.3)  # idle for longer than a head may take
