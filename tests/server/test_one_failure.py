"""One job, team or node whose data are bad harms no other: proofs of what stopped the whole server before."""

import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from support.servers import House, house
from test_controller import Clock, row, submitted, turned_until

from mimatrix.api.models import ENDED, PROTOCOL, JobState
from mimatrix.core.errors import WorldError
from mimatrix.launch import LocalLauncher, Member, Team
from mimatrix.server.db.models import JobRow

pytestmark = pytest.mark.timeout(90)
SLEEPS = "import time; time.sleep(60)"


def reported(there: House, number: int, rank: int, **more: Any) -> None:
    live = there.context.live.all()[number]
    from mimatrix.api.models import Report

    body = {"protocol": PROTOCOL, "generation": live.generation, "rank": rank, "state": "training", **more}
    live.reports[rank], live.heard[rank] = Report.model_validate(body), there.context.clock()


def test_a_stored_plan_of_huge_numbers_stops_no_other_job(tmp_path: Path) -> None:
    """H1: any worker may store a plan, and the scheduler computes with it."""
    clock = Clock()
    with house(tmp_path, clock=clock) as there:
        bad = submitted(there, "print(1)")
        turned_until(there, bad, *ENDED)
        clock.ahead_s += 60  # speeds of earlier runs are read again
        with there.context.sessions.begin() as session:
            plan = {"ranks": [{"name": "cpu", "busy_s": 0.5}], "micro": [[10**400]]}
            session.get_one(JobRow, bad).plan = plan
        clean = submitted(there, "print(2)")
        assert turned_until(there, clean, *ENDED).state == JobState.DONE


def test_deeply_nested_groups_stop_no_other_job(tmp_path: Path) -> None:
    """H2: groups came as JSON in the environment of a submission."""
    with house(tmp_path) as there:
        bad = submitted(there, "print(1)", environment={"MIMATRIX_GROUPS": "[" * 4096})
        clean = submitted(there, "print(2)")
        assert turned_until(there, clean, *ENDED).state == JobState.DONE
        assert row(there, bad).state is not None


def test_reports_that_sum_to_more_than_a_message_takes_stop_no_other_job(tmp_path: Path) -> None:
    """H3: two groups report 1e9 samples per second each, and `Progress` takes 1e9."""
    with house(tmp_path) as there:
        bad = submitted(there, SLEEPS, devices="2")
        turned_until(there, bad, JobState.STARTING)
        for rank in (0, 1):
            reported(there, bad, rank, group=rank, samples_per_s=1e9)
        clean = submitted(there, "print(2)")
        assert turned_until(there, clean, *ENDED).state == JobState.DONE
        assert row(there, bad).state == JobState.TRAINING


def packed(folder: Path) -> Path:
    path = folder / "code.tar.gz"
    (folder / "x.py").write_text(SLEEPS)
    with tarfile.open(path, mode="w:gz") as tar:
        tar.add(folder / "x.py", "x.py")
    return path


def test_teams_that_the_database_does_not_know_are_ended(tmp_path: Path) -> None:
    """H10: as after a restored backup, or when the last commit was lost."""
    import sys

    with house(tmp_path, devices=2) as there:
        node = there.context.launcher.nodes()[0].name
        members = (Member(node, 0), Member(node, 1))
        there.context.launcher.start(Team("job-99.1", (sys.executable, "x.py"), members, packed(tmp_path)))
        deadline = time.monotonic() + 30
        while "job-99.1" in (states := there.context.launcher.states()) and not states["job-99.1"].has_ended:
            assert time.monotonic() < deadline, "it runs on"
            there.controller.reconcile()
            time.sleep(0.05)


class Flaky:
    """A launcher that cannot start anything for a while, as a node without descriptors or memory cannot."""

    def __init__(self, inner: LocalLauncher, failures: int, error: Exception) -> None:
        self.inner, self.failures, self.error = inner, failures, error

    def start(self, team: Team) -> None:
        if self.failures:
            self.failures -= 1
            raise self.error
        self.inner.start(team)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize("error", [WorldError("too many open files"), OSError(24, "Too many open files")])
def test_a_start_that_fails_for_a_moment_is_tried_again_and_is_no_retry(tmp_path: Path, error: Exception) -> None:
    """M12: with `retries` 0, the default, such a job failed for good."""
    clock = Clock()
    with house(tmp_path, clock=clock) as there:
        object.__setattr__(there.context, "launcher", Flaky(there.context.launcher, 2, error))
        number = submitted(there, "print(1)")
        deadline = time.monotonic() + 30
        while row(there, number).state not in ENDED:
            assert time.monotonic() < deadline
            there.controller.reconcile()
            clock.ahead_s += 5
            time.sleep(0.05)
        assert row(there, number).state == JobState.DONE
        assert row(there, number).retried == 0


def test_a_clock_that_jumps_ends_no_job(tmp_path: Path) -> None:
    """M14: time limits and grace periods went by the wall clock."""
    clock = Clock()
    with house(tmp_path, clock=clock) as there:
        number = submitted(there, SLEEPS, max_time_s=600)
        turned_until(there, number, JobState.STARTING)
        clock.ahead_s = 7200
        there.controller.reconcile()
        assert row(there, number).stop_kind == ""


def test_a_clock_that_jumps_deletes_no_output(tmp_path: Path) -> None:
    clock = Clock()
    with house(tmp_path, clock=clock) as there:
        number = submitted(there, "print('hello')")
        turned_until(there, number, *ENDED)
        clock.ahead_s = 20 * 365 * 86_400
        there.controller.reconcile()
        assert there.ask("dee", "GET", f"/api/jobs/{number}/log").json()["text"] == "hello\n"


POISONS = {
    "no such devices": "UPDATE jobs SET devices = 'x y z' WHERE id = :id",
    "environment that is a list": "UPDATE jobs SET environment = '[1, 2]' WHERE id = :id",
    "arguments that are a number": "UPDATE jobs SET arguments = '7' WHERE id = :id",
    "an archive without a name": "UPDATE jobs SET snapshot = '../..' WHERE id = :id",
    "devices that are a number": "UPDATE jobs SET seats = '7', state = 'training', generation = 1 WHERE id = :id",
}


@pytest.mark.parametrize("poison", POISONS)
def test_a_job_whose_stored_data_raise_stops_no_other(tmp_path: Path, poison: str) -> None:
    with house(tmp_path) as there:
        bad = submitted(there, "print(1)")
        with there.context.sessions.begin() as session:
            session.execute(text(POISONS[poison]), {"id": bad})
        clean = [submitted(there, f"print({number})") for number in (2, 3)]
        for number in clean:
            assert turned_until(there, number, *ENDED).state == JobState.DONE


class Poison:
    """What a worker said, which raises whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"poison in {name}")


def test_a_job_whose_reports_raise_stops_no_other(tmp_path: Path) -> None:
    with house(tmp_path) as there:
        bad = submitted(there, SLEEPS)
        turned_until(there, bad, JobState.STARTING)
        there.context.live.all()[bad].reports[0] = Poison()  # type: ignore[assignment]
        clean = [submitted(there, f"print({number})") for number in (2, 3)]
        for number in clean:
            assert turned_until(there, number, *ENDED).state == JobState.DONE
