"""What reports are made of: gauges asked now and then, curves that are thinned, a connection that is kept."""

import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from mimatrix.core.errors import UserError, WorldError
from mimatrix.wire.client import Client
from mimatrix.wire.messages import PROTOCOL, JobState, Report
from mimatrix.worker import device_metrics as gauges
from mimatrix.worker.reporting import until_turn
from mimatrix.worker.tensorboard import TensorBoardWriter

pytestmark = pytest.mark.timeout(30)
REPORT = Report(protocol=PROTOCOL, generation=1, rank=0, state=JobState.TRAINING)


def test_gauges_are_asked_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, asked = 0.0, []
    monkeypatch.setattr("mimatrix.worker.device_metrics.time.monotonic", lambda: now_s)
    told = gauges._now_and_then(lambda: asked.append(now_s) or len(asked))  # type: ignore[func-returns-value]
    for second in range(30):
        now_s = float(second)
        assert told() == len(asked)
    assert asked == [0, 1, 2, 4, 8, 13, 18, 23, 28]


def test_ranks_of_a_job_report_at_once_and_jobs_in_turn() -> None:
    for job, every_s in ((1, 1.0), (2, 1.0), (7, 5.0)):
        turns = {
            round((now_s + until_turn(job, every_s, now_s)) % every_s, 3) % every_s
            for now_s in (1e9 + 0.17 * step for step in range(50))
        }
        assert len(turns) == 1
    assert all(0.25 <= until_turn(3, 1.0, 1e9 + 0.01 * step) <= 1.25 for step in range(100))
    assert len({round(until_turn(job, 1.0, 1e9), 3) for job in range(50)}) == 50


class FakeRun:
    """Logs a loss in each step, and an accuracy once."""

    step = 100

    def logged(self, start: int) -> list[tuple[int, dict[str, float]]]:
        return [(step, {"loss": 1 / (1 + step)} | ({"accuracy": 0.5} if step == 41 else {})) for step in range(100)][
            start:
        ]


def test_a_curve_is_thinned_and_a_rare_point_is_kept(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = TensorBoardWriter(tmp_path)
    for _ in range(2):
        board.follow(FakeRun(), {"step_s": 0.01})
    board.close()
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    steps = {name: [each.step for each in found.Scalars(name)] for name in ("loss", "accuracy", "speed/step_s")}
    assert steps == {"loss": list(range(9, 100, 10)), "accuracy": [41], "speed/step_s": [100]}


class Handler(BaseHTTPRequestHandler):
    """Answers once on each connection if it is told so, and then lets the connection go without a word."""

    protocol_version = "HTTP/1.1"
    status, content, closes = 200, b'{"leave":false,"again_s":1.0,"notice":""}', False
    heard: ClassVar[list[tuple[str, str, bytes]]] = []
    connections: ClassVar[set[object]] = set()

    def do_POST(self) -> None:
        """A report."""
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
        assert client.report(7, REPORT).again_s == 1.0
    path, authorization, body = handler.heard[0]
    assert (path, authorization) == ("/api/jobs/7/report", "Bearer secret")
    assert Report.model_validate_json(body) == REPORT
    assert (len(handler.heard), len(handler.connections)) == (3, 1)


def test_a_connection_that_the_server_let_go_is_made_again(served: tuple[type[Handler], Client]) -> None:
    handler, client = served
    handler.closes = True
    for _ in range(3):
        client.report(7, REPORT)
    assert len(handler.connections) == 3


def test_a_refusal_is_said_in_the_servers_words(served: tuple[type[Handler], Client]) -> None:
    handler, client = served
    handler.status, handler.content = 409, b'{"status":409,"title":"Not now","detail":"it was ended"}'
    with pytest.raises(UserError, match="it was ended"):
        client.report(7, REPORT)
    handler.status, handler.content = 500, b"oh"
    with pytest.raises(WorldError, match="answered 500"):
        client.report(7, REPORT)


def test_who_is_not_there_is_named() -> None:
    with closing(Client("http://127.0.0.1:9", "secret")) as client, pytest.raises(WorldError, match="does not answer"):
        client.report(7, REPORT)


def test_a_proxy_is_used_where_one_is_set(
    served: tuple[type[Handler], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, client = served
    monkeypatch.setenv("http_proxy", client._address)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with closing(Client("http://far.example:7700", "secret")) as far:
        far.report(7, REPORT)
    assert handler.heard[0][0] == "http://far.example:7700/api/jobs/7/report"
