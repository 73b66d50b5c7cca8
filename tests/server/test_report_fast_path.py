"""Reports in order are answered without routing; everything else goes the long way, as it came."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.servers import app_server
from test_api import ARCHIVE, DIGEST, submitted, worker

from mimatrix.api.models import PROTOCOL, JobState, Report, ReportReply
from mimatrix.server.web.authentication import AuthenticateFirst
from mimatrix.server.web.report_fast_path import ReportFastPath

pytestmark = pytest.mark.timeout(60)
REPORT = Report(protocol=PROTOCOL, generation=1, rank=1, state=JobState.TRAINING, step=3)


def asked(
    way: AuthenticateFirst, secret: str, chunks: list[bytes], path: str = "/api/jobs/1/report", **more: Any
) -> list[Any]:
    """Send a request, and return what was answered."""
    headers = [(b"authorization", b"Bearer " + secret.encode()), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers} | more
    left = [
        {"type": "http.request", "body": chunk, "more_body": number < len(chunks)}
        for number, chunk in enumerate(chunks, start=1)
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return left.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(way(scope, receive, send))
    return sent


def test_the_short_way_and_the_long_way(tmp_path: Path) -> None:
    long: list[bytes] = []

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        long.append(body)

    with app_server(tmp_path) as found:
        context, text = found.context, REPORT.model_dump_json().encode()
        assert found.ask("ben", "PUT", f"/api/code-archives/{DIGEST}", content=ARCHIVE).status_code == 204
        assert submitted(found) == 1
        worker(found, 1)
        secret = found.secrets["worker-1"]
        way = AuthenticateFirst(ReportFastPath(app, context), context.authenticator)

        start, body = asked(way, secret, [text])
        assert start["status"] == 200
        assert ReportReply.model_validate_json(body["body"]) == ReportReply(
            leave=False, report_interval_s=1.0, notice=""
        )
        assert (context.live.all()[1].reports, long) == ({1: REPORT}, [])

        unusual: list[tuple[Any, ...]] = [
            (secret, [text[:9], text[9:]]),
            (secret, [b"{}"]),
            (secret, [text], "/api/jobs/2/report"),
            (secret, [REPORT.model_copy(update={"generation": 2}).model_dump_json().encode()]),
            (found.secrets["ben"], [text]),
        ]
        for number, words in enumerate(unusual, start=1):
            assert asked(way, *words) == []
            assert (len(long), long[-1]) == (number, b"".join(words[1]))
        for refused in (asked(way, "guessed", [text]), asked(way, secret, [text], headers=[])):
            assert refused[0]["status"] == 401
        assert len(long) == len(unusual)
