"""Teams that start slowly hold up no turn; stops reach jobs that are starting; nothing starts twice."""

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.servers import AppServer, app_server
from test_controller import row, submitted, turned_until

from mimatrix.api.models import ENDED, EventKind, JobState
from mimatrix.launch import Launcher, StartError, Team
from mimatrix.server.controller.reconcile import Controller
from mimatrix.server.controller.start_threads import StartThreads
from mimatrix.server.db.models import JobRow

pytestmark = pytest.mark.timeout(60)
SLEEPS = "import time; time.sleep(60)"


class Slow:
    """A launcher whose starts wait until they are let go, before or after the team is there."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.go, self.go_after = threading.Event(), threading.Event()
        self.go_after.set()
        self.starts: Counter[str] = Counter()
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launcher, name)

    def start(self, team: Team) -> None:
        self.starts[team.name] += 1
        assert self.go.wait(30)
        if self.error:
            raise self.error
        self._launcher.start(team)
        assert self.go_after.wait(30)


@contextmanager
def slow_server(folder: Path, threads: int = 8, devices: int = 4) -> Iterator[tuple[AppServer, Slow]]:
    found: list[Slow] = []

    def wrap(launcher: Launcher) -> Launcher:
        found.append(Slow(launcher))
        return found[0]

    with app_server(folder, devices=devices, wrap=wrap, executor=StartThreads(threads)) as there:
        try:
            yield there, found[0]
        finally:
            found[0].go.set()
            found[0].go_after.set()
            there.controller.stop(10)


def turn(there: AppServer, condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        there.controller.reconcile()
        time.sleep(0.02)


def cancel(there: AppServer, number: int) -> None:
    assert there.ask("ben", "POST", f"/api/jobs/{number}/cancel").status_code == 200


def kinds(there: AppServer, number: int) -> list[str]:
    return [event["kind"] for event in there.ask("ben", "GET", f"/api/jobs/{number}/events").json()]


def test_slow_starts_hold_up_no_turn_and_happen_once(tmp_path: Path) -> None:
    with slow_server(tmp_path) as (there, slow):
        numbers = [submitted(there, "print(1)") for _ in range(3)]
        began_s = time.monotonic()
        for _ in range(10):
            there.controller.reconcile()
        assert time.monotonic() - began_s < 10
        assert [row(there, number).state for number in numbers] == [JobState.STARTING] * 3
        slow.go.set()
        for number in numbers:
            assert turned_until(there, number, *ENDED).state == JobState.DONE
        assert slow.starts == {f"job-{number}.1": 1 for number in numbers}
        assert all(kinds(there, number).count("starting") == 1 for number in numbers)


def test_a_team_that_is_up_before_its_start_has_returned_is_followed_and_started_once(tmp_path: Path) -> None:
    with slow_server(tmp_path) as (there, slow):
        slow.go_after.clear()
        slow.go.set()
        number = submitted(there, "print(1)")
        turn(there, lambda: bool((states := there.context.launcher.states()) and states[f"job-{number}.1"].has_ended))
        for _ in range(3):
            there.controller.reconcile()
        assert row(there, number).state == JobState.STARTING, "its start may still fail"
        slow.go_after.set()
        assert turned_until(there, number, *ENDED).state == JobState.DONE
        assert slow.starts == {f"job-{number}.1": 1}


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_job_that_is_cancelled_while_it_starts_is_ended(tmp_path: Path, is_listed: bool) -> None:
    with slow_server(tmp_path) as (there, slow):
        number = submitted(there, SLEEPS)
        if is_listed:
            slow.go_after.clear()
            slow.go.set()
        there.controller.reconcile()
        turn(there, lambda: slow.starts.total() == 1 and is_listed == bool(there.context.launcher.states()))
        cancel(there, number)
        there.controller.reconcile()
        assert row(there, number).state == JobState.STARTING
        slow.go.set()
        slow.go_after.set()
        assert turned_until(there, number, *ENDED).state == JobState.CANCELLED
        assert slow.starts == {f"job-{number}.1": 1}
        assert all(state.has_ended for state in there.context.launcher.states().values())


@pytest.mark.wording
def test_a_job_that_is_cancelled_before_a_thread_is_free_never_starts(tmp_path: Path) -> None:
    with slow_server(tmp_path, threads=1) as (there, slow):
        first, second = submitted(there, SLEEPS), submitted(there, SLEEPS)
        turn(there, lambda: row(there, second).state == JobState.STARTING and slow.starts.total() == 1)
        cancel(there, second)
        assert turned_until(there, second, *ENDED).state == JobState.CANCELLED
        assert row(there, second).reason.startswith("it was not started")
        assert slow.starts == {f"job-{first}.1": 1}


@pytest.mark.parametrize("is_transient", [True, False])
def test_a_job_that_is_cancelled_and_cannot_start_is_cancelled(tmp_path: Path, is_transient: bool) -> None:
    """One that was put back into the queue would have forgotten that it is to end."""
    with slow_server(tmp_path) as (there, slow):
        number = submitted(there, SLEEPS)
        turn(there, lambda: slow.starts.total() == 1)
        cancel(there, number)
        slow.error = StartError("the node is silent", is_transient=is_transient)
        slow.go.set()
        assert turned_until(there, number, *ENDED).state == JobState.CANCELLED
        assert EventKind.START_FAILED not in kinds(there, number)


@pytest.mark.parametrize(("is_transient", "state"), [(True, JobState.QUEUED), (False, JobState.FAILED)])
@pytest.mark.wording
def test_a_start_that_fails_is_written_down_in_a_later_turn(tmp_path: Path, is_transient: bool, state: str) -> None:
    with slow_server(tmp_path) as (there, slow):
        number = submitted(there, SLEEPS)
        turn(there, lambda: slow.starts.total() == 1)
        slow.error = StartError("the node is silent", is_transient=is_transient)
        slow.go.set()
        assert "the node is silent" in turned_until(there, number, JobState(state)).reason or is_transient
        assert (EventKind.START_FAILED in kinds(there, number)) == is_transient
        assert slow.starts == {f"job-{number}.1": 1}


def test_devices_of_a_start_that_is_pending_are_given_to_no_other_job(tmp_path: Path) -> None:
    """Its job failed meanwhile: the team may be about to run."""
    with slow_server(tmp_path, devices=1) as (there, slow):
        number = submitted(there, SLEEPS)
        turn(there, lambda: slow.starts.total() == 1)
        with there.context.sessions.begin() as session:
            job = session.get_one(JobRow, number)
            job.state, job.allocation = JobState.FAILED, []
        other = submitted(there, "print(1)")
        for _ in range(5):
            there.controller.reconcile()
        assert row(there, other).state == JobState.QUEUED
        slow.go.set()
        assert turned_until(there, other, *ENDED).state == JobState.DONE
        assert row(there, number).state == JobState.FAILED


def test_a_server_after_a_crash_starts_what_was_pending_once(tmp_path: Path) -> None:
    with slow_server(tmp_path, threads=1) as (there, slow):
        numbers = [submitted(there, "print(1)") for _ in range(2)]
        turn(there, lambda: [row(there, number).state for number in numbers] == [JobState.STARTING] * 2)
        there.controller.stop(0)  # as if it was gone: the first start has begun, the second has not
        there.controller = Controller(there.context, there.controller.environment, StartThreads())
        there.controller.recover()
        slow.go.set()
        for number in numbers:
            found = turned_until(there, number, *ENDED)
            assert (found.state, found.generation) == (JobState.DONE, 1)
            assert there.context.launcher.read_log(f"job-{number}.1", 0, 0).data == b"1\n"


def test_a_start_that_is_pending_does_not_keep_the_process_from_ending() -> None:
    code = """
import threading
from mimatrix.server.controller.start_threads import StartThreads
begun = threading.Event()
StartThreads(1).submit(lambda: (begun.set(), threading.Event().wait()))
begun.wait()
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=20, check=False).returncode == 0


def test_threads_are_few_and_pass_results_and_errors() -> None:
    threads, names = StartThreads(2), set()
    futures = [threads.submit(lambda: names.add(threading.current_thread().name)) for _ in range(10)]
    for future in futures:
        future.result(10)
    assert len(names) <= 2
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 // 0).result(10)
    assert threads.submit(divmod, 7, 2).result(10) == (3, 1)
