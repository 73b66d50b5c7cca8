"""Reports over HTTP: one connection that is kept, errors in the server's words, proxies."""

import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from mimatrix.api.client import Client
from mimatrix.api.models import PROTOCOL, JobState, Report, Submission
from mimatrix.core.errors import UserError, WorldError

pytestmark = pytest.mark.timeout(30)


REPORT = Report(protocol=PROTOCOL, generation=1, rank=0, state=JobState.TRAINING)


class Handler(BaseHTTPRequestHandler):
    """Answers once on each connection if it is told so, and then lets the connection go without a word."""

    protocol_version = "HTTP/1.1"
    status, content, closes = 200, b'{"leave":false,"report_interval_s":1.0,"notice":""}', False
    heard: ClassVar[list[tuple[str, str, bytes]]] = []
    connections: ClassVar[set[object]] = set()

    def do_POST(self) -> None:
        """Record a report and answer it."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.heard.append((self.path, self.headers["Authorization"], body))
        self.connections.add(self.client_address)
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)
        self.close_connection = self.closes

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def served() -> Iterator[tuple[type[Handler], Client]]:
    kind = type("Fresh", (Handler,), {"heard": [], "connections": set()})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with closing(Client(f"http://127.0.0.1:{server.server_port}", "secret")) as client:
            yield kind, client
        server.shutdown()


def test_reports_keep_one_connection(served: tuple[type[Handler], Client]) -> None:
    handler, client = served
    for _ in range(3):
        assert client.report(7, REPORT).report_interval_s == 1.0
    path, authorization, body = handler.heard[0]
    assert (path, authorization) == ("/api/jobs/7/report", "Bearer secret")
    assert Report.model_validate_json(body) == REPORT
    assert (len(handler.heard), len(handler.connections)) == (3, 1)


def test_a_connection_closed_by_the_server_is_reopened(served: tuple[type[Handler], Client]) -> None:
    handler, client = served
    handler.closes = True
    for _ in range(3):
        client.report(7, REPORT)
    assert len(handler.connections) == 3


def test_a_refusal_has_the_servers_words(served: tuple[type[Handler], Client]) -> None:
    handler, client = served
    handler.status, handler.content = 409, b'{"status":409,"title":"Not now","detail":"it was ended"}'
    with pytest.raises(UserError, match="it was ended"):
        client.report(7, REPORT)
    handler.status, handler.content = 500, b"oh"
    with pytest.raises(WorldError, match="answered 500"):
        client.report(7, REPORT)


def test_a_server_that_does_not_answer_is_named() -> None:
    with closing(Client("http://127.0.0.1:9", "secret")) as client, pytest.raises(WorldError, match="does not answer"):
        client.report(7, REPORT)


def test_a_proxy_is_used_if_one_is_set(served: tuple[type[Handler], Client], monkeypatch: pytest.MonkeyPatch) -> None:
    handler, client = served
    monkeypatch.setenv("http_proxy", client._address)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with closing(Client("http://far.example:7700", "secret")) as far:
        far.report(7, REPORT)
    assert handler.heard[0][0] == "http://far.example:7700/api/jobs/7/report"


def test_a_submission_whose_answer_was_lost_is_asked_for_again_with_its_key() -> None:
    class Lost(Handler):
        def do_POST(self) -> None:
            self.heard.append(("", "", self.rfile.read(int(self.headers["Content-Length"]))))
            self.connection.close()  # the job was queued, and the connection broke before the answer
            self.close_connection = True

        def finish(self) -> None:
            """Nothing is left to be sent."""

    Lost.heard = []
    job = Submission(name="x", script="x.py", code_archive="0" * 64)
    with ThreadingHTTPServer(("127.0.0.1", 0), Lost) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = Client(f"http://127.0.0.1:{server.server_port}", "secret")
        with closing(client), pytest.raises(WorldError, match="does not answer"):
            client.submit(job)
        server.shutdown()
    first, second = (Submission.model_validate_json(body) for _, _, body in Lost.heard)
    assert first.key == second.key != ""
