"""The reporter goes on whatever a run, a disk or a server does, so that a job hears that it is to leave."""

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mimatrix.api.client import Client
from mimatrix.api.models import Report, ReportReply
from mimatrix.worker.rendezvous import WorkerIdentity
from mimatrix.worker.reporting import Reporter

HUGE = 10**400


class JobServer(ThreadingHTTPServer):
    """Answers the first report as it is told, and asks the job to leave from the second on."""

    def __init__(self, first_answer: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.first_answer = (
            first_answer or ReportReply(leave=False, report_interval_s=0.05, speaks=True).model_dump_json()
        )
        self.reports: list[Report] = []


class _Handler(BaseHTTPRequestHandler):
    server: JobServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.reports.append(Report.model_validate_json(body))
        is_first = len(self.server.reports) == 1
        answer = (
            self.server.first_answer
            if is_first
            else ReportReply(leave=True, report_interval_s=0.05, speaks=True).model_dump_json()
        )
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *_: Any) -> None:
        pass


class RunStandIn:
    """What a reporter asks of a run."""

    plan = measurements = None
    checkpoints = plan_changes = ()
    rank, step = 0, 7
    position = SimpleNamespace(epoch=1)
    split = SimpleNamespace(batches=(8,))
    settings = SimpleNamespace(follows=False)
    status = SimpleNamespace(phase="training", is_excluded=False, waiting=None, group=0, pushes=None)

    def __init__(
        self,
        metrics: dict[str, Any] | None = None,
        step_s: float = 0.1,
        samples: int = 8,
        fault: Exception | None = None,
    ) -> None:
        self._entries, self._step_s = [(7, metrics)] if metrics else [], step_s
        self._samples, self._fault = samples, fault
        self.is_asked: Callable[[], bool] = lambda: False

    def stats(self) -> list[Any]:
        if self._fault:
            raise self._fault
        parts = dict.fromkeys(("compute_s", "waiting_s", "communication_s", "data_s"), self._step_s)
        moved_bytes = {"all_reduce": self._samples}
        return [SimpleNamespace(seconds=self._step_s, samples=self._samples, moved_bytes=moved_bytes, **parts)]

    def history_from(self, start: int) -> list[Any]:
        return self._entries[start:]

    def flush_log(self) -> None:
        pass

    def enable_preemption(self, is_asked: Callable[[], bool], _: Path) -> None:
        self.is_asked = is_asked


@contextmanager
def reporting(run: RunStandIn, folder: Path, first_answer: str = "") -> Iterator[JobServer]:
    with JobServer(first_answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        identity = WorkerIdentity(server=url, token="secret", job=7, generation=1, rank=0)
        with Client(url, "secret") as client:
            reporter = Reporter(client, identity, folder)
            reporter.observe(run)
            reporter.start()
            try:
                yield server
            finally:
                reporter.stop()
        server.shutdown()


def hears(run: RunStandIn, within_s: float = 8) -> bool:
    """Whether the run is asked to leave in time."""
    deadline = time.monotonic() + within_s
    while not run.is_asked() and time.monotonic() < deadline:
        time.sleep(0.01)
    return run.is_asked()


def test_metrics_beyond_floats_are_reported_as_not_finite(tmp_path: Path) -> None:
    run = RunStandIn(metrics={"loss": HUGE, "accuracy": 0.5, "error": float("nan")})
    with reporting(run, tmp_path) as server:
        assert hears(run)
    logged = [entry.metrics for report in server.reports for entry in report.logged]
    assert {"loss": None, "accuracy": 0.5, "error": None} in logged


@pytest.mark.parametrize("step_s", [1e-15, 1e30, float("nan"), float("inf"), -1.0])
def test_rates_are_bounded_before_they_are_sent(tmp_path: Path, step_s: float) -> None:
    run = RunStandIn(step_s=step_s, samples=1 << 60)
    with reporting(run, tmp_path) as server:
        assert hears(run)
    assert all(0 <= report.samples_per_s <= 1e9 and 0 <= report.step_s <= 1e9 for report in server.reports)


def test_an_answer_that_is_no_json_is_told_once_and_leaving_is_heard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunStandIn()
    with caplog.at_level(logging.WARNING, "mimatrix"), reporting(run, tmp_path, "<html>a proxy's page</html>"):
        assert hears(run)
    assert len([message for message in caplog.messages if "training continues" in message]) == 1


@pytest.mark.parametrize("fault", [RuntimeError("a device failed"), RecursionError("deep"), KeyError("gone")])
def test_a_run_that_cannot_be_described_still_hears_that_it_is_to_leave(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: Exception
) -> None:
    run = RunStandIn(fault=fault)
    with caplog.at_level(logging.WARNING, "mimatrix"), reporting(run, tmp_path):
        assert hears(run)
    assert len([message for message in caplog.messages if "training continues" in message]) == 1


@pytest.mark.parametrize("method", ["add_scalar", "close"])
def test_a_full_disk_ends_tensorboard_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    pytest.importorskip("tensorboard")

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"torch.utils.tensorboard.SummaryWriter.{method}", refuse)
    run = RunStandIn(metrics={"loss": 0.5})
    with caplog.at_level(logging.WARNING, "mimatrix"), reporting(run, tmp_path):
        assert hears(run)
    assert len([message for message in caplog.messages if "TensorBoard" in message]) == 1
