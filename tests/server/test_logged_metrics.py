"""What a script logs reaches the job's curves, `mimatrix metrics` and TensorBoard: every validation, too."""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.models import cross_entropy, seeded_perceptron, vectors
from support.servers import AppServer, app_server
from test_api import ARCHIVE, DIGEST, submitted, worker
from test_controller import Clock
from test_metrics_routes import reported

from mimatrix.api.models import History, Report, ReportReply
from mimatrix.cli.jobs import top
from mimatrix.core.errors import WorldError
from mimatrix.engine.mode import Membership
from mimatrix.engine.run import Run
from mimatrix.engine.settings import Settings
from mimatrix.engine.world import World
from mimatrix.server.controller.endings import JobEnder
from mimatrix.server.controller.faults import Faults
from mimatrix.server.db.models import JobRow
from mimatrix.server.metrics.store import HistoryStore
from mimatrix.worker.rendezvous import WorkerIdentity
from mimatrix.worker.reporting import Reporter


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def there(tmp_path: Path, clock: Clock) -> Iterator[AppServer]:
    with app_server(tmp_path, clock=clock) as found:
        assert found.ask("ben", "PUT", f"/api/code-archives/{DIGEST}", content=ARCHIVE).status_code == 204
        yield found


class AppClient:
    """Hands reports to a server as a worker does, in JSON."""

    def __init__(self, there: AppServer) -> None:
        self._there = there

    def report(self, job: int, report: Report) -> ReportReply:
        headers = {"content-type": "application/json"} | self._there.headers(f"worker-{job}")
        path = f"/api/jobs/{job}/report"
        answer = self._there.http.post(path, headers=headers, content=report.model_dump_json())
        assert answer.status_code == 200, answer.text
        return ReportReply.model_validate_json(answer.content)


class DeadClient:
    """A server that does not answer."""

    def report(self, job: int, report: Report) -> ReportReply:
        raise WorldError("no answer")


def begun(there: AppServer) -> int:
    number = submitted(there)
    worker(there, number, ("n/0",))
    with there.context.sessions.begin() as session:
        session.get_one(JobRow, number).started_at = there.context.clock()
    return number


def run_script(reporter: Reporter, epochs: int) -> None:
    """Train as a script does, with a validation before the first batch and after each epoch."""
    run = Run(Membership(World.join(Settings(global_batch=5, quiet=True))))
    reporter.observe(run)
    model, optimizer = seeded_perceptron()
    _, prepared, loader = run.prepare(model, optimizer, vectors(10), shuffle=False)
    run.log(val=1.0)
    for epoch in run.epochs(epochs):
        for batch in loader:
            loss = cross_entropy(model, batch)
            run.backward(loss)
            prepared.step()
            run.log(loss=loss)
        run.log(val=1 / (2 + epoch), test=float("nan"))


def reporter_of(client: Any, number: int, folder: Path) -> Reporter:
    identity = WorkerIdentity(server="http://127.0.0.1:9", token="secret", job=number, generation=1, rank=0)
    return Reporter(client, identity, folder)


def end(there: AppServer, number: int) -> None:
    with there.context.sessions.begin() as session:
        ender = JobEnder(
            there.context, Faults(there.context), there.controller.environment, HistoryStore(there.context.sessions)
        )
        ender.clean_up(session, session.get_one(JobRow, number), 1)


def points_of(there: AppServer, number: int, most: int = 1000) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = there.ask("dee", "GET", f"/api/jobs/{number}/history?points={most}").json()["points"]
    return points


def curve(points: list[dict[str, Any]], name: str) -> list[tuple[int, float | None]]:
    return [(point["step"], point["metrics"][name]) for point in points if name in point["metrics"]]


def test_every_validation_of_a_run_is_a_point_at_its_step_the_last_one_too(there: AppServer, tmp_path: Path) -> None:
    number = begun(there)
    reporter = reporter_of(AppClient(there), number, tmp_path)
    reporter.start()
    run_script(reporter, epochs=20)
    reporter.stop()
    end(there, number)
    points = points_of(there, number)
    expected = [1.0, *(float(f"{1 / (2 + epoch):.4g}") for epoch in range(20))]
    # The newest value is repeated at the job's last point only if it is logged in every second entry.
    assert list(dict.fromkeys(curve(points, "val"))) == [(2 * epoch, value) for epoch, value in enumerate(expected)]
    assert curve(points, "test")[-1] == (40, None)
    assert curve(points, "loss")[-1][0] == 40
    assert [point["step"] for point in points] == sorted(point["step"] for point in points)
    newest = there.ask("dee", "GET", f"/api/jobs/{number}").json()["progress"]
    assert (newest["step"], newest["metrics"]["val"], newest["metrics"]["test"]) == (40, pytest.approx(1 / 21), None)


def test_tensorboard_has_what_was_logged_last_even_if_the_server_does_not_answer(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reporter = reporter_of(DeadClient(), 7, tmp_path)
    reporter.start()
    run_script(reporter, epochs=2)
    reporter.stop()
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    steps = {name: [each.step for each in found.Scalars(name)] for name in ("loss", "val", "test")}
    assert steps == {"loss": [0, 1, 2, 3], "val": [0, 2, 4], "test": [2, 4]}


def test_logs_of_two_runs_in_one_process_are_both_followed(there: AppServer, tmp_path: Path) -> None:
    number = begun(there)
    reporter = reporter_of(AppClient(there), number, tmp_path)
    runs = [Run(Membership(World.join(Settings(global_batch=5, quiet=True)))) for _ in range(2)]
    for run, name in zip(runs, ("generator", "critic"), strict=True):
        reporter.observe(run)
        run.prepare(*seeded_perceptron(), vectors(5))
        run.log(**{name: 1.0})
    runs[0].log(generator=0.5)
    reporter.start()
    reporter.stop()
    end(there, number)
    points = points_of(there, number)
    assert (curve(points, "generator"), curve(points, "critic")) == ([(0, 1.0), (0, 0.5)], [(0, 1.0)])


def test_points_of_what_was_logged_are_thinned_with_the_others(there: AppServer, clock: Clock) -> None:
    number = begun(there)
    for minute in range(24):
        clock.ahead_s += 5
        logged = [{"step": 10 * minute, "metrics": {"val": float(minute)}}] if minute % 6 == 0 else []
        reported(there, number, 0, step=10 * minute + 9, logged=logged)
        there.controller.keep_history()
    points = points_of(there, number)
    assert curve(points, "val") == [(0, 0.0), (60, 6.0), (120, 12.0), (180, 18.0)]
    assert [point["samples_per_s"] for point in points if "val" in point["metrics"]] == [None] * 4
    assert len(curve(points, "loss")) == 24
    fewer = points_of(there, number, most=16)
    assert len(fewer) <= 16
    assert [value for _, value in curve(fewer, "val")] == [0.0, 6.0, 12.0, 18.0]
    assert all(point["step_s"] == 0.25 for point in fewer)


@pytest.mark.wording
def test_what_was_logged_is_bounded(there: AppServer) -> None:
    number = begun(there)
    body = {"protocol": 3, "generation": 1, "rank": 0, "state": "training"}
    for logged, why in (
        ([{"step": 1, "metrics": {}}] * 65, "at most 64"),
        ([{"step": 1, "metrics": {str(name): 1.0 for name in range(33)}}], "at most 32"),
        ([{"step": -1, "metrics": {}}], "greater than or equal to 0"),
    ):
        answer = there.ask(f"worker-{number}", "POST", f"/api/jobs/{number}/report", json={**body, "logged": logged})
        assert answer.status_code == 422
        assert why in answer.text


@pytest.mark.parametrize("as_csv", [False, True])
def test_mimatrix_metrics_shows_validations_at_their_steps(
    there: AppServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_csv: bool
) -> None:
    number = begun(there)
    logged = [{"step": 0, "metrics": {"val": 2.5}}, {"step": 6, "metrics": {"val": None}}]
    reported(there, number, 0, logged=logged)
    there.controller.keep_history()

    class ClientStub:
        def history(self, number: int, points: int) -> History:
            found = there.ask("dee", "GET", f"/api/jobs/{number}/history?points={points}")
            return History.model_validate_json(found.content)

    @contextmanager
    def connected() -> Iterator[ClientStub]:
        yield ClientStub()

    monkeypatch.setattr(top, "connected", connected)
    top.metrics(number, as_csv=as_csv, points=300, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    if as_csv:
        rows = [[row[name] for name in ("step", "samples_per_s", "val", "loss")] for row in csv.DictReader(lines)]
        assert rows == [["0", "", "2.5", ""], ["6", "", "nan", ""], ["7", "400.0", "", "0.5"]]
    else:
        shown = [" ".join(line.split()[2:]) for line in lines]
        assert shown == ["step 0 val 2.5", "step 6 val nan", "step 7 400 samples/s 250ms loss 0.5"]
