"""Requests cost the server nothing before their token is known: no body is read, and no row is written."""

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from sqlalchemy import func, select
from support.servers import AppServer, app_server

from mimatrix.server.db.models import AuditRow
from mimatrix.server.web.limits import BodyLimits


@pytest.fixture
def there(tmp_path: Path) -> Iterator[AppServer]:
    with app_server(tmp_path) as found:
        yield found


@contextmanager
def served(app: Any) -> Iterator[int]:
    """Run a real server, and yield its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(timeout=10)


def begun(port: int, token: str, size: int, path: str = "/api/jobs") -> socket.socket:
    """Open a connection and send the head of a POST, whose body does not follow."""
    wire = socket.create_connection(("127.0.0.1", port), timeout=10)
    secret = f"Authorization: Bearer {token}\r\n" if token else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\n{secret}Content-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    )
    wire.sendall(head.encode())
    return wire


def audited(there: AppServer) -> int:
    with there.context.sessions() as session:
        return session.scalar(select(func.count(AuditRow.id))) or 0


@pytest.mark.parametrize("token", ["", "mm_guessed"])
@pytest.mark.wording
def test_an_unknown_token_is_refused_before_the_body_is_there(there: AppServer, token: str) -> None:
    with served(there.http.app) as port, closing(begun(port, token, 4 << 20)) as wire:
        answer = b""
        while part := wire.recv(1000):
            answer += part
        assert answer.startswith(b"HTTP/1.1 401 Unauthorized")
        assert b"MIMATRIX_TOKEN" in answer


def test_requests_without_a_known_token_write_no_audit_rows(there: AppServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="mimatrix"):
        for _ in range(30):
            assert there.http.post("/api/jobs", json={}).status_code == 401
        for _ in range(15):
            answer = there.http.delete("/api/tokens/1", headers={"Authorization": "Bearer mm_guessed"})
            assert answer.status_code in (401, 429)
    assert audited(there) == 0
    assert there.context.authenticator.refusals == 45
    (line,) = (record.getMessage() for record in caplog.records if "without a valid token" in record.getMessage())
    assert line.startswith("1 requests without a valid token")
    there.ask("ben", "POST", "/api/jobs", json={})
    assert audited(there) == 1


def test_requests_without_a_known_token_are_a_metric(there: AppServer) -> None:
    there.http.get("/api/jobs")
    assert "mimatrix_unauthenticated_requests_total 1.0" in there.ask("dee", "GET", "/metrics").text


async def read_all(_scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def test_a_body_that_trickles_in_ends_at_its_deadline() -> None:
    with served(BodyLimits(read_all, chunk_s=5.0, body_s=1.0)) as port, closing(begun(port, "", 1000)) as wire:
        began_s = time.monotonic()
        wire.settimeout(0.05)
        answer = b""
        while not answer:
            assert time.monotonic() - began_s < 5, "no answer, though a byte came every 50 ms only"
            wire.sendall(b"x")
            try:
                answer = wire.recv(1000)
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.1 408")


def test_a_body_that_comes_in_time_is_taken() -> None:
    with served(BodyLimits(read_all, chunk_s=5.0, body_s=5.0)) as port, closing(begun(port, "", 3)) as wire:
        for _ in range(3):
            wire.sendall(b"x")
        assert wire.recv(1000).startswith(b"HTTP/1.1 200")


@pytest.mark.wording
def test_the_server_is_not_ready_while_its_controller_stands_still(there: AppServer) -> None:
    assert there.http.get("/readyz").status_code == 200
    there.context.controller_turned_at_s -= 31
    answer = there.http.get("/readyz")
    assert answer.status_code == 503
    assert "the controller has not completed a turn for 3" in answer.json()["detail"]
    assert there.http.get("/healthz").status_code == 200
