"""Turns of the loop, one by one, with real teams and a clock that the test moves."""

import hashlib
import io
import tarfile
import time
from pathlib import Path

import pytest
from support.servers import AppServer, app_server

from mimatrix.api.models import ENDED, JobState
from mimatrix.scheduler import StartKind, StartReason
from mimatrix.server.context import team_name
from mimatrix.server.controller.faults import Faults
from mimatrix.server.controller.speeds import SpeedTable
from mimatrix.server.db.models import JobRow
from mimatrix.server.jobs import events
from mimatrix.server.jobs.lifecycle import transition


class Clock:
    """Real time, and what the test adds to it: time that passes, and jumps of the wall clock alone."""

    ahead_s = 0.0
    jumped_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s + self.jumped_s

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


def uploaded(there: AppServer, script: str) -> str:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        entry, content = tarfile.TarInfo("x.py"), script.encode()
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    digest = hashlib.sha256(packed.getvalue()).hexdigest()
    assert there.ask("ben", "PUT", f"/api/code-archives/{digest}", content=packed.getvalue()).status_code == 204
    return digest


def submitted(there: AppServer, script: str, **more: object) -> int:
    body = {"name": "x", "script": "x.py", "code_archive": uploaded(there, script), **more}
    number: int = there.ask("ben", "POST", "/api/jobs", json=body).json()["id"]
    return number


def row(there: AppServer, number: int) -> JobRow:
    with there.context.sessions() as session:
        return session.get_one(JobRow, number)


def turned_until(there: AppServer, number: int, *states: JobState) -> JobRow:
    deadline = time.monotonic() + 30
    while row(there, number).state not in states:
        assert time.monotonic() < deadline, row(there, number).reason
        there.controller.reconcile()
        time.sleep(0.05)
    return row(there, number)


def reasons(there: AppServer, number: int) -> list[str]:
    return [event["reason"] for event in there.ask("ben", "GET", f"/api/jobs/{number}/events").json()]


@pytest.mark.timeout(60)
@pytest.mark.wording
def test_restarts_are_counted_and_bad_input_is_not_restarted(tmp_path: Path) -> None:
    with app_server(tmp_path) as there:
        lost = submitted(there, "import sys; sys.exit(3)", max_restarts=1)
        assert turned_until(there, lost, *ENDED).state == JobState.FAILED
        assert row(there, lost).generation == 2
        assert any("restart 1 of 1" in reason for reason in reasons(there, lost))
        bad = submitted(there, "import sys; sys.exit(2)", max_restarts=5)
        assert turned_until(there, bad, *ENDED).generation == 1
        assert row(there, bad).exit_code == 2


@pytest.mark.timeout(60)
@pytest.mark.wording
def test_one_that_does_not_save_in_time_is_ended_and_waits_again(tmp_path: Path) -> None:
    clock = Clock()
    with app_server(tmp_path, devices=1, clock=clock) as there:
        low = submitted(there, "import time; time.sleep(60)", priority=10, preemptible=True)
        turned_until(there, low, JobState.STARTING)
        high = submitted(there, "print('hello')", priority=90)
        there.controller.reconcile()
        assert row(there, low).stop_kind == "preempt"
        assert row(there, high).reason == f"needs 1 x cpu; waits for job {low} to save and stop"
        clock.ahead_s = 200
        turned_until(there, low, JobState.PREEMPTED)
        assert "stopped without a checkpoint; it starts from the last one" in reasons(there, low)
        assert turned_until(there, high, *ENDED).state == JobState.DONE
        there.ask("ben", "POST", f"/api/jobs/{low}/cancel")
        assert turned_until(there, low, *ENDED).state == JobState.CANCELLED


@pytest.mark.timeout(60)
@pytest.mark.wording
def test_one_that_crashes_when_it_should_make_room_has_failed(tmp_path: Path) -> None:
    with app_server(tmp_path, devices=1) as there:
        crash = tmp_path / "crash"
        waits = f"import pathlib, time\nwhile not pathlib.Path('{crash}').exists(): time.sleep(0.05)\n"
        low = submitted(there, waits + "raise ValueError('no room')", priority=10, preemptible=True)
        turned_until(there, low, JobState.STARTING)
        high = submitted(there, "print('hello')", priority=90)
        there.controller.reconcile()
        assert row(there, low).stop_kind == "preempt"
        crash.touch()
        found = turned_until(there, low, *ENDED, JobState.PREEMPTED)
        assert (found.state, found.exit_code) == (JobState.FAILED, 1)
        assert found.reason.endswith(
            '/0 ended with exit code 1; its last line: "ValueError: no room"; it had been told to save and stop'
        )
        assert turned_until(there, high, *ENDED).state == JobState.DONE


@pytest.mark.timeout(60)
@pytest.mark.wording
def test_who_waits_for_a_cancelled_job_is_told_so(tmp_path: Path) -> None:
    with app_server(tmp_path, devices=1) as there:
        first = submitted(there, "import signal, time\nsignal.signal(15, lambda *_: None)\nprint('up')\ntime.sleep(60)")
        turned_until(there, first, JobState.STARTING)
        second = submitted(there, "print('hello')")
        there.ask("ben", "POST", f"/api/jobs/{first}/cancel")
        there.controller.reconcile()
        assert row(there, second).reason == f"needs 1 x cpu; waits for job {first} to end"


@pytest.mark.timeout(60)
@pytest.mark.wording
def test_a_job_that_was_written_down_but_not_started_is_started(tmp_path: Path) -> None:
    """As after a kill between the two."""
    with app_server(tmp_path) as there:
        number = submitted(there, "print('hello')")
        there.controller.refresh_nodes()
        (node,) = there.context.launcher.nodes()
        reason = StartReason(kind=StartKind.IN_TURN, devices=(("cpu", 1),), nodes=(node.name,))
        with there.context.sessions.begin() as session:
            job = session.get_one(JobRow, number)
            job.allocation = [f"{node.name}/0"]
            transition(session, job, JobState.STARTING, events.starting(reason), there.context.clock())
        assert team_name(number, 1) not in there.context.launcher.states()
        there.controller.recover()
        assert turned_until(there, number, *ENDED).state == JobState.DONE
        assert row(there, number).generation == 1
        assert reasons(there, number)[-1] == "all ranks ended well"


@pytest.mark.timeout(60)
def test_output_of_long_ago_is_forgotten(tmp_path: Path) -> None:
    clock = Clock()
    with app_server(tmp_path, clock=clock) as there:
        number = submitted(there, "print('hello')")
        turned_until(there, number, *ENDED)
        assert there.ask("dee", "GET", f"/api/jobs/{number}/log").json()["text"] == "hello\n"
        clock.ahead_s = 15 * 86_400
        there.controller.reconcile()
        assert there.context.launcher.states() == {}
        assert there.ask("dee", "GET", f"/api/jobs/{number}/log").json() == {
            "generation": 1,
            "text": "",
            "next_offset": 0,
            "has_ended": True,
        }


@pytest.mark.timeout(60)
def test_devices_that_an_earlier_run_found_fast_are_known(tmp_path: Path) -> None:
    clock = Clock()
    with app_server(tmp_path, clock=clock) as there:
        first = submitted(there, "print('hello')")
        turned_until(there, first, *ENDED)
        with there.context.sessions.begin() as session:
            plan = {"parts": [{"name": "cpu", "busy_s": 0.5}], "split": [[100]]}
            session.get_one(JobRow, first).plan = plan
        table = SpeedTable(there.context, Faults(there.context))
        table.refresh()
        assert table.speeds == {("ben", "x"): {"cpu": 200.0}}
        with there.context.sessions.begin() as session:
            session.get_one(JobRow, first).plan = {}
        clock.ahead_s += 60
        table.refresh()
        assert table.speeds == {("ben", "x"): {"cpu": 200.0}}, "a job that ended before says nothing new"


@pytest.mark.timeout(60)
def test_output_in_pieces_is_whole(tmp_path: Path) -> None:
    with app_server(tmp_path) as there:
        number = submitted(there, "print('日本語é' * 40_000)")
        turned_until(there, number, *ENDED)
        text, offset = "", 0
        while (part := there.ask("dee", "GET", f"/api/jobs/{number}/log?offset={offset}").json())["text"]:
            text, offset = text + part["text"], part["next_offset"]
        assert text == "日本語é" * 40_000 + "\n"
        beyond = there.ask("dee", "GET", f"/api/jobs/{number}/log?offset={1 << 53}")
        assert (beyond.status_code, beyond.json()["text"]) == (200, "")


@pytest.mark.timeout(60)
def test_a_long_queue_is_explained_without_a_flood_of_events(tmp_path: Path) -> None:
    with app_server(tmp_path, devices=1) as there:
        numbers = [submitted(there, "print('hello')") for _ in range(6)]
        for number in numbers:
            turned_until(there, number, *ENDED)
        assert max(len(reasons(there, number)) for number in numbers) <= 6


@pytest.mark.timeout(60)
def test_jobs_save_every_15_minutes_unless_they_say_something_else(tmp_path: Path) -> None:
    with app_server(tmp_path, checkpoints=str(tmp_path / "checkpoints")) as there:
        for given, expected in (({}, "15m"), ({"MIMATRIX_CHECKPOINT_EVERY": "never"}, "never")):
            script = f"import os, sys; sys.exit(os.environ['MIMATRIX_CHECKPOINT_EVERY'] != {expected!r})"
            job = submitted(there, script, environment=given)
            assert turned_until(there, job, *ENDED).state == JobState.DONE
