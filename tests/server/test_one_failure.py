"""One job, team or node whose data are bad harms no other: proofs of what stopped the whole server before."""

import errno
import sys
import tarfile
import time
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import event, select, text
from sqlalchemy.exc import TimeoutError  # noqa: A004 (of the pool)
from sqlalchemy.orm import Session
from support.servers import AppServer, app_server
from test_controller import Clock, row, submitted, turned_until, uploaded

from mimatrix.api.models import ENDED, PROTOCOL, EventKind, JobState, Report
from mimatrix.core.errors import WorldError
from mimatrix.launch import Launcher, Member, Team
from mimatrix.server.controller import scheduling
from mimatrix.server.controller.faults import Faults, Remedy
from mimatrix.server.controller.retention import RetentionSettings
from mimatrix.server.db.models import CodeArchiveRow, JobRow, TokenRow
from mimatrix.server.jobs.code_archives import CodeArchives
from mimatrix.server.jobs.quotas import Quotas

pytestmark = pytest.mark.timeout(90)
SLEEPS = "import time; time.sleep(60)"


def reported(there: AppServer, number: int, rank: int, **more: Any) -> None:
    live = there.context.live.all()[number]

    body = {"protocol": PROTOCOL, "generation": live.generation, "rank": rank, "state": "training", **more}
    live.record_report(rank, Report.model_validate(body), there.context.clock())


def test_a_stored_plan_of_huge_numbers_stops_no_other_job(tmp_path: Path) -> None:
    """H1: any worker may store a plan, and the scheduler computes with it."""
    clock = Clock()
    with app_server(tmp_path, clock=clock) as there:
        bad = submitted(there, "print(1)")
        turned_until(there, bad, *ENDED)
        clock.ahead_s += 60  # speeds of earlier runs are read again
        with there.context.sessions.begin() as session:
            plan = {"parts": [{"name": "cpu", "busy_s": 0.5}], "split": [[10**400]]}
            session.get_one(JobRow, bad).plan = plan
        clean = submitted(there, "print(2)")
        assert turned_until(there, clean, *ENDED).state == JobState.DONE


@pytest.mark.wording
def test_deeply_nested_groups_stop_no_other_job(tmp_path: Path) -> None:
    """H2: groups came as JSON in the environment of a submission."""
    with app_server(tmp_path) as there:
        body = {"name": "x", "script": "x.py", "code_archive": uploaded(there, "print(1)")}
        nested = {**body, "environment": {"MIMATRIX_GROUPS": "[" * 4096}}
        refused = there.ask("ben", "POST", "/api/jobs", json=nested)
        assert (refused.status_code, "give groups as a field" in refused.json()["detail"]) == (422, True)
        bad = submitted(there, "print(1)")
        deep = "[" * 100 + "]" * 100
        with there.context.sessions.begin() as session:
            session.execute(text("UPDATE jobs SET groups = :deep WHERE id = :id"), {"deep": deep, "id": bad})
        clean = submitted(there, "print(2)")
        assert turned_until(there, clean, *ENDED).state == JobState.DONE
        assert turned_until(there, bad, *ENDED).state == JobState.FAILED


def test_a_job_that_the_server_failed_keeps_its_groups_for_a_retry(tmp_path: Path) -> None:
    with app_server(tmp_path) as there:
        number = submitted(there, "print(1)", devices="2", groups=[[0], [1]])
        faults = Faults(there.context)
        faults.add("schedule", number, RuntimeError("no"), Remedy.FAIL)
        faults.settle()
        assert there.ask("ben", "POST", f"/api/jobs/{number}/retry").json()["groups"] == [[0], [1]]


@pytest.mark.wording
def test_a_job_whose_groups_cannot_be_read_is_not_queued_again_without_them(tmp_path: Path) -> None:
    with app_server(tmp_path) as there:
        number = submitted(there, "print(1)", devices="2", groups=[[0], [1]])
        with there.context.sessions.begin() as session:
            session.execute(text("UPDATE jobs SET groups = '[7' WHERE id = :id"), {"id": number})
        there.controller.reconcile()
        assert row(there, number).state == JobState.FAILED
        refused = there.ask("ben", "POST", f"/api/jobs/{number}/retry")
        assert (refused.status_code, "groups" in refused.json()["detail"]) == (409, True)


def test_reports_that_sum_to_more_than_a_message_takes_stop_no_other_job(tmp_path: Path) -> None:
    """H3: two groups report 1e9 samples per second each, and `Progress` takes 1e9."""
    with app_server(tmp_path) as there:
        bad = submitted(there, SLEEPS, devices="2")
        turned_until(there, bad, JobState.STARTING)
        for rank in (0, 1):
            reported(there, bad, rank, group=rank, samples_per_s=1e9)
        clean = submitted(there, "print(2)")
        assert turned_until(there, clean, *ENDED).state == JobState.DONE
        assert row(there, bad).state == JobState.TRAINING


def sleeper(name: str, node: str, ranks: int, folder: Path) -> Team:
    """Return a team of the launcher that no job of the database has started."""
    archive = folder / "code.tar.gz"
    (folder / "x.py").write_text(SLEEPS)
    with tarfile.open(archive, mode="w:gz") as tar:
        tar.add(folder / "x.py", "x.py")
    members = tuple(Member(node, rank) for rank in range(ranks))
    return Team(name=name, command=(sys.executable, "x.py"), members=members, archive=archive)


def test_teams_that_the_database_does_not_know_are_ended(tmp_path: Path) -> None:
    """H10: as after a restored backup, or when the last commit was lost."""
    with app_server(tmp_path, devices=2) as there:
        node = there.context.launcher.nodes()[0].name
        there.context.launcher.start(sleeper("job-99.1", node, 2, tmp_path))
        deadline = time.monotonic() + 30
        while "job-99.1" in (states := there.context.launcher.states()) and not states["job-99.1"].has_ended:
            assert time.monotonic() < deadline, "it runs on"
            there.controller.reconcile()
            time.sleep(0.05)


class Flaky:
    """A launcher of which one method fails a few times, as on a node without descriptors or memory."""

    def __init__(self, inner: Launcher, failures: int, error: Exception, method: str = "start") -> None:
        self.inner, self.failures, self.error, self.method = inner, failures, error, method

    def __getattr__(self, name: str) -> Any:
        if name == self.method and self.failures:
            return self._fail
        return getattr(self.inner, name)

    def _fail(self, *_: object) -> None:
        self.failures -= 1
        raise self.error


def flaky(inner: Launcher, failures: int, error: Exception, method: str = "start") -> Launcher:
    return cast(Launcher, Flaky(inner, failures, error, method))


SHORTAGES = [
    OSError(errno.EMFILE, "Too many open files"),
    MemoryError(),
    TimeoutError("QueuePool limit reached, connection timed out"),
]


@pytest.mark.parametrize("method", ["start", "read_log"])
@pytest.mark.parametrize("error", SHORTAGES, ids=lambda error: type(error).__name__)
def test_a_shortage_of_a_moment_ends_no_job(tmp_path: Path, method: str, error: Exception) -> None:
    """Such a job failed, although it could start a moment later or had restarts left."""
    clock = Clock()
    with app_server(tmp_path, clock=clock, wrap=lambda launcher: flaky(launcher, 2, error, method)) as there:
        number = submitted(there, "import sys; sys.exit('x')", max_restarts=1)
        deadline = time.monotonic() + 30
        while row(there, number).state not in ENDED:
            assert time.monotonic() < deadline
            there.controller.reconcile()
            clock.ahead_s += 5
            time.sleep(0.05)
        assert there.context.launcher.failures == 0  # type: ignore[attr-defined]
        assert (row(there, number).exit_code, row(there, number).restarts) == (1, 1)


@pytest.mark.parametrize("error", [WorldError("too many open files"), OSError(24, "Too many open files")])
def test_a_start_that_fails_for_a_moment_is_tried_again_and_is_not_a_restart(tmp_path: Path, error: Exception) -> None:
    """M12: with `max_restarts` 0, the default, such a job failed for good."""
    clock = Clock()
    with app_server(tmp_path, clock=clock, wrap=lambda launcher: flaky(launcher, 2, error)) as there:
        number = submitted(there, "print(1)")
        deadline = time.monotonic() + 30
        while row(there, number).state not in ENDED:
            assert time.monotonic() < deadline
            there.controller.reconcile()
            clock.ahead_s += 5
            time.sleep(0.05)
        assert row(there, number).state == JobState.DONE
        assert row(there, number).restarts == 0


def test_a_clock_that_jumps_ends_no_job(tmp_path: Path) -> None:
    """M14: time limits and grace periods went by the wall clock."""
    clock = Clock()
    with app_server(tmp_path, clock=clock) as there:
        number = submitted(there, SLEEPS, max_time_s=600)
        turned_until(there, number, JobState.STARTING)
        clock.jumped_s = 7200
        there.controller.reconcile()
        assert row(there, number).stop_kind == ""


def test_a_clock_that_jumps_deletes_no_output(tmp_path: Path) -> None:
    clock = Clock()
    with app_server(tmp_path, clock=clock) as there:
        number = submitted(there, "print('hello')")
        turned_until(there, number, *ENDED)
        clock.jumped_s = 20 * 365 * 86_400
        there.controller.reconcile()
        assert there.ask("dee", "GET", f"/api/jobs/{number}/log").json()["text"] == "hello\n"


POISONS = {
    "no such devices": "UPDATE jobs SET devices = 'x y z' WHERE id = :id",
    "environment that is a list": "UPDATE jobs SET environment = '[1, 2]' WHERE id = :id",
    "arguments that are a number": "UPDATE jobs SET arguments = '7' WHERE id = :id",
    "an archive without a name": "UPDATE jobs SET code_archive = '../..' WHERE id = :id",
    "devices that are a number": "UPDATE jobs SET allocation = '7', state = 'training', generation = 1 WHERE id = :id",
}


@pytest.mark.parametrize("poison", POISONS)
def test_a_job_whose_stored_data_raise_stops_no_other(tmp_path: Path, poison: str) -> None:
    with app_server(tmp_path) as there:
        bad = submitted(there, "print(1)")
        with there.context.sessions.begin() as session:
            session.execute(text(POISONS[poison]), {"id": bad})
        clean = [submitted(there, f"print({number})") for number in (2, 3)]
        for number in clean:
            assert turned_until(there, number, *ENDED).state == JobState.DONE


class Poison:
    """What a worker said, which raises whatever is asked of it."""

    logged = ()

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"poison in {name}")


def test_a_job_whose_reports_raise_stops_no_other(tmp_path: Path) -> None:
    with app_server(tmp_path) as there:
        bad = submitted(there, SLEEPS)
        turned_until(there, bad, JobState.STARTING)
        there.context.live.all()[bad].record_report(0, Poison(), 0.0)  # type: ignore[arg-type]
        clean = [submitted(there, f"print({number})") for number in (2, 3)]
        for number in clean:
            assert turned_until(there, number, *ENDED).state == JobState.DONE


UNDECIDABLE = {
    "a time limit that is a word": "UPDATE jobs SET max_time_s = 'long' WHERE id = :id",
    "a priority that is a word": "UPDATE jobs SET priority = 'high', preemptible = 1 WHERE id = :id",
}


@pytest.mark.parametrize("poison", UNDECIDABLE)
@pytest.mark.wording
def test_a_running_job_that_nothing_can_be_decided_with_fails_no_queued_job(tmp_path: Path, poison: str) -> None:
    """Each queued job was tried with the running ones, and was blamed for them."""
    with app_server(tmp_path, devices=3) as there:
        bad, good = submitted(there, SLEEPS), submitted(there, SLEEPS, preemptible=True)
        turned_until(there, bad, JobState.STARTING)
        turned_until(there, good, JobState.STARTING)
        with there.context.sessions.begin() as session:
            session.execute(text(UNDECIDABLE[poison]), {"id": bad})
        clean = [submitted(there, "print(2)", priority=90) for _ in range(2)]
        waits = submitted(there, "print(3)", devices="3", priority=10)
        for number in clean:
            assert turned_until(there, number, *ENDED).state == JobState.DONE
        assert row(there, waits).state == JobState.QUEUED
        assert row(there, good).server_error == ""
        assert row(there, bad).state == JobState.STARTING
        assert "schedule" in row(there, bad).server_error


def test_what_no_job_is_to_blame_for_fails_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def undecided(*_: object) -> None:
        raise ArithmeticError("no")

    with app_server(tmp_path) as there:
        queued = submitted(there, "print(2)")
        with monkeypatch.context() as patch:
            patch.setattr(scheduling, "decide", undecided)
            there.controller.reconcile()
        assert row(there, queued).state == JobState.QUEUED
        assert turned_until(there, queued, *ENDED).state == JobState.DONE


def test_a_fault_is_told_once_whatever_its_words(tmp_path: Path) -> None:
    """An event was new if its sentence was: after an upgrade that words it otherwise, each was told again."""
    with app_server(tmp_path) as there:
        number = submitted(there, SLEEPS)
        for sentence in ("", "other words"):
            with there.context.sessions.begin() as session:
                session.get_one(JobRow, number).server_error = sentence
            faults = Faults(there.context)
            faults.add("reports", number, RuntimeError("no"))
            faults.settle()
        told = there.ask("ben", "GET", f"/api/jobs/{number}/events").json()
        assert [event["kind"] for event in told].count(EventKind.SERVER_ERROR) == 1


@pytest.mark.wording
def test_a_fault_that_could_not_be_recorded_is_recorded_when_it_is_raised_again(tmp_path: Path) -> None:
    with app_server(tmp_path) as there:
        number, faults = submitted(there, SLEEPS), Faults(there.context)
        for old, new in (("jobs", "elsewhere"), ("elsewhere", "jobs")):
            renamed(there, old, new)
            faults.add("reports", number, RuntimeError("no"))
            faults.settle()
        assert "reports" in row(there, number).server_error


def test_a_running_job_whose_stored_data_raise_keeps_its_devices_until_it_has_ended(tmp_path: Path) -> None:
    """Its devices are known from what was allocated; otherwise another job would get them while it runs."""
    with app_server(tmp_path, devices=1) as there:
        bad = submitted(there, SLEEPS)
        turned_until(there, bad, JobState.STARTING)
        with there.context.sessions.begin() as session:
            session.execute(text("UPDATE jobs SET allocation = '[7]' WHERE id = :id"), {"id": bad})
        clean = submitted(there, "print(2)")
        there.controller.reconcile()
        assert row(there, clean).state == JobState.QUEUED
        assert turned_until(there, clean, *ENDED).state == JobState.DONE
        assert row(there, bad).state == JobState.FAILED
        assert row(there, bad).server_error


@pytest.mark.wording
def test_what_went_wrong_is_recorded_once_and_not_each_turn(tmp_path: Path) -> None:
    with app_server(tmp_path) as there:
        bad = submitted(there, SLEEPS)
        turned_until(there, bad, JobState.STARTING)
        there.context.live.all()[bad].record_report(0, Poison(), 0.0)  # type: ignore[arg-type]
        for _ in range(5):
            there.controller.reconcile()
        told = there.ask("ben", "GET", f"/api/jobs/{bad}/events").json()
        errors = [event for event in told if event["kind"] == EventKind.SERVER_ERROR]
        assert len({event["data"]["stage"] for event in errors}) == len(errors) > 0
        assert "poison" in there.ask("ben", "GET", f"/api/jobs/{bad}").json()["server_error"]
        assert row(there, bad).state == JobState.STARTING


def test_a_failed_start_is_told_as_a_value_with_a_pause_that_grows(tmp_path: Path) -> None:
    clock, error = Clock(), WorldError("too many open files")
    with app_server(tmp_path, clock=clock, wrap=lambda launcher: flaky(launcher, 3, error)) as there:
        number = submitted(there, "print(1)")
        while row(there, number).state not in ENDED:
            there.controller.reconcile()
            clock.ahead_s += 4
            time.sleep(0.02)
        told = there.ask("ben", "GET", f"/api/jobs/{number}/events").json()
        pauses = [event["data"]["pause_s"] for event in told if event["kind"] == EventKind.START_FAILED]
        assert pauses == [5.0, 10.0, 20.0]
        assert [event["data"]["wait"]["kind"] for event in told if event["kind"] == EventKind.WAITING].count(
            "start_paused"
        ) == 3


def test_teams_are_left_alone_while_the_database_cannot_be_read(tmp_path: Path) -> None:
    with app_server(tmp_path) as there:
        number = submitted(there, SLEEPS)
        turned_until(there, number, JobState.STARTING)
        with there.context.sessions.begin() as session:
            session.execute(text("ALTER TABLE jobs RENAME TO elsewhere"))
        there.controller.reconcile()
        (state,) = there.context.launcher.states().values()
        assert not state.has_ended
        assert there.context.monotonic() - there.context.controller_turned_at_s >= 0
        with there.context.sessions.begin() as session:
            session.execute(text("ALTER TABLE elsewhere RENAME TO jobs"))


def test_a_restored_database_gives_teams_new_names(tmp_path: Path) -> None:
    """A team of the lost future has the name that the job would get next, and other code."""
    with app_server(tmp_path, devices=1) as there:
        number = submitted(there, "print('new')")
        node = there.context.launcher.nodes()[0].name
        there.context.launcher.start(sleeper(f"job-{number}.1", node, 1, tmp_path))
        found = turned_until(there, number, *ENDED)
        assert (found.state, found.generation) == (JobState.DONE, 2)
        assert there.ask("dee", "GET", f"/api/jobs/{number}/log").json()["text"] == "new\n"


def test_a_user_cannot_fill_the_queue_for_all(tmp_path: Path) -> None:
    with app_server(tmp_path, quotas=Quotas(queued_jobs=2, code_archive_bytes=1)) as there:
        body = {"name": "x", "script": "x.py", "code_archive": uploaded(there, "print(1)")}
        for _ in range(2):
            assert there.ask("ben", "POST", "/api/jobs", json=body).status_code == 201
        refused = there.ask("ben", "POST", "/api/jobs", json=body)
        assert refused.status_code == 409
        with pytest.raises(AssertionError):
            uploaded(there, "print('more')")


def test_a_dry_run_does_not_touch_the_controller(tmp_path: Path) -> None:
    with app_server(tmp_path, devices=1) as there:
        there.controller.refresh_nodes()
        body = {"name": "x", "script": "x.py", "code_archive": uploaded(there, "print(1)")}
        assert there.ask("ben", "POST", "/api/jobs/dry-run", json=body).json()["starts"]
        found = there.ask("ben", "POST", "/api/jobs/dry-run", json={**body, "devices": "9"}).json()
        assert (found["starts"], found["reason_data"]["kind"]) == (False, "too_few_devices")


def test_a_preempted_or_restarted_job_keeps_its_age(tmp_path: Path) -> None:
    """As in `simulate-queue`, and as the scheduler's state says."""
    clock = Clock()
    with app_server(tmp_path, clock=clock) as there:
        number = submitted(there, "import sys; sys.exit(3)", max_restarts=1)
        submitted_at = row(there, number).submitted_at
        clock.ahead_s += 100
        assert turned_until(there, number, *ENDED).generation == 2
        assert row(there, number).submitted_at == submitted_at
        assert row(there, number).waiting_since > submitted_at + 90


def renamed(there: AppServer, old: str, new: str) -> None:
    with there.context.sessions.begin() as session:
        session.execute(text(f"ALTER TABLE {old} RENAME TO {new}"))


@pytest.mark.parametrize("table", ["tokens", "jobs", "audit"])
@pytest.mark.wording
def test_without_its_database_the_server_says_so(tmp_path: Path, table: str, caplog: pytest.LogCaptureFixture) -> None:
    """503, which clients try again, and not 500: also where the token is looked up, before any route."""
    with app_server(tmp_path) as there:
        number = submitted(there, "print(1)")
        there.context.authenticator.clear()
        renamed(there, table, "elsewhere")
        refused = there.ask("ben", "POST", f"/api/jobs/{number}/cancel")
        renamed(there, "elsewhere", table)
        if table == "audit":
            assert refused.json()["state"] == "cancelled"
            assert "the audit log lacks POST /api/jobs/1/cancel by ben" in caplog.text
        else:
            assert (refused.status_code, "database" in refused.json()["detail"]) == (503, True)


class Undeletable:
    """A launcher that cannot delete the output of some team."""

    def __init__(self, inner: Launcher, team: str) -> None:
        self.inner, self.team = inner, team

    def forget(self, team: str) -> None:
        if team == self.team:
            raise OSError(errno.EACCES, "Permission denied")
        self.inner.forget(team)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_output_that_cannot_be_deleted_keeps_no_other(tmp_path: Path) -> None:
    clock = Clock()
    with app_server(tmp_path, clock=clock, wrap=lambda inner: cast(Launcher, Undeletable(inner, "job-1.1"))) as there:
        numbers = [submitted(there, f"print({number})") for number in range(3)]
        for number in numbers:
            turned_until(there, number, *ENDED)
        clock.ahead_s += 15 * 86_400
        there.controller.delete_old()
        assert list(there.context.launcher.states()) == ["job-1.1"]


def test_an_archive_that_cannot_be_deleted_keeps_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    with app_server(tmp_path, clock=clock) as there:
        numbers = [submitted(there, f"print({number})") for number in range(2)]
        for number in numbers:
            turned_until(there, number, *ENDED)
        digests = sorted(row(there, number).code_archive for number in numbers)
        delete = CodeArchives.delete

        def delete_others(self: CodeArchives, digest: str) -> None:
            if digest == digests[0]:
                raise OSError(errno.EACCES, "Permission denied")
            delete(self, digest)

        monkeypatch.setattr(CodeArchives, "delete", delete_others)
        clock.ahead_s += 31 * 86_400
        there.controller.delete_old()
        with there.context.sessions() as session:
            assert list(session.scalars(select(CodeArchiveRow.digest))) == digests[:1]


@pytest.mark.parametrize("kept_s", [None, 30 * 86_400.0])
def test_checkpoints_of_jobs_that_ended_long_ago_are_deleted_if_that_is_set(
    tmp_path: Path, kept_s: float | None
) -> None:
    clock, root = Clock(), tmp_path / "checkpoints"
    retention = RetentionSettings(checkpoints_s=kept_s)
    with app_server(tmp_path, clock=clock, checkpoints=str(root), retention=retention) as there:
        old, again, waits = submitted(there, "print(1)"), submitted(there, "print(2)"), submitted(there, "print(3)")
        for number in (old, again, waits):
            turned_until(there, number, *ENDED)
        for number in (old, again, waits):
            (root / f"job-{number}" / "step-3").mkdir()
        (root / f"job-{waits + 1}").mkdir()
        assert there.ask("ben", "POST", f"/api/jobs/{waits}/retry").status_code == 200
        saved = {"path": str(root / f"job-{old}" / "step-3"), "step": 3}
        with there.context.sessions.begin() as session:
            session.get_one(JobRow, old).checkpoints = [saved]
            session.get_one(JobRow, again).ended_at = clock() + 30 * 86_400
        clock.ahead_s += 31 * 86_400
        there.controller.delete_old()
        left = {folder.name for folder in root.iterdir()}
        kept = {f"job-{number}" for number in (again, waits, waits + 1)}
        assert left == (kept if kept_s else {*kept, f"job-{old}"})
        told = there.ask("dee", "GET", f"/api/jobs/{old}/events").json()
        deleted = [event["data"] for event in told if event["kind"] == EventKind.CHECKPOINTS_DELETED]
        assert deleted == ([{"kept_s": kept_s}] if kept_s else [])
        assert there.ask("dee", "GET", f"/api/jobs/{old}").json()["resumes_from"] == (None if kept_s else 3)


def test_checkpoints_stay_if_their_deletion_cannot_be_written(tmp_path: Path) -> None:
    clock, root = Clock(), tmp_path / "checkpoints"
    retention = RetentionSettings(checkpoints_s=60.0)

    def refuse(_: Session) -> None:
        if list(root.glob(".deleted-*")):
            raise RuntimeError("the disk is full")

    with app_server(tmp_path, clock=clock, checkpoints=str(root), retention=retention) as there:
        number = submitted(there, "print(1)")
        turned_until(there, number, *ENDED)
        clock.ahead_s += 3600
        event.listen(Session, "before_commit", refuse)
        try:
            there.controller.delete_old()
        finally:
            event.remove(Session, "before_commit", refuse)
        assert [folder.name for folder in root.iterdir()] == [f"job-{number}"]
        clock.ahead_s += 3600
        there.controller.delete_old()
        assert list(root.iterdir()) == []


def test_old_events_tokens_and_archives_are_deleted(tmp_path: Path) -> None:
    clock = Clock()
    with app_server(tmp_path, clock=clock) as there:
        number = submitted(there, "print(1)")
        waits = submitted(there, "print(2)", devices="99")
        turned_until(there, number, *ENDED)
        clock.ahead_s += 400 * 86_400
        there.controller.delete_old()
        assert there.ask("dee", "GET", f"/api/jobs/{number}/events").json() == []
        assert there.ask("dee", "GET", f"/api/jobs/{waits}/events").json() != []
        with there.context.sessions() as session:
            assert list(session.scalars(select(TokenRow).where(TokenRow.job == number))) == []
            archives = set(session.scalars(select(CodeArchiveRow.digest)))
        assert archives == {row(there, waits).code_archive}
        assert there.context.code_archives.path(row(there, number).code_archive) is None
