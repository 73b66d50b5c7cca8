"""Rows that cannot be read, as of a restored or damaged database, harm only themselves."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.servers import AppServer, app_server
from test_controller import submitted, turned_until
from typer.testing import CliRunner

from mimatrix.api.client import Client
from mimatrix.api.models import ENDED, JobState
from mimatrix.cli.main import app
from mimatrix.core.errors import WorldError

pytestmark = pytest.mark.timeout(90)
SLEEPS = "import time; time.sleep(60)"
DAMAGES = {
    "allocation": """allocation = '["vm/1'""",
    "arguments": "arguments = '{broken'",
    "groups": "groups = '5'",
    "state": "state = 'weird'",
    "reason": "reason_data = '[]'",
    "progress": "progress = '[1]'",
    "time": "created_at = 1e300",
}
ENDS_TEAM = {
    "allocation": """allocation = '["vm/1'""",
    "arguments": "arguments = '{broken'",
    "stop kind": "stop_kind = 'weird'",
}
READS = ("/api/jobs", "/api/nodes", "/metrics")


def damaged(there: AppServer, number: int, columns: str) -> None:
    execute(there, f"UPDATE jobs SET {columns} WHERE id = {number}")


def execute(there: AppServer, statement: str) -> None:
    with there.context.sessions.begin() as session:
        # `text` would take a colon in JSON for a parameter.
        session.connection().exec_driver_sql(statement)


def listed(there: AppServer) -> dict[int, dict[str, object]]:
    answer = there.ask("dee", "GET", "/api/jobs")
    assert answer.status_code == 200, answer.text
    return {job["id"]: job for job in answer.json()["jobs"]}


def turned(there: AppServer, is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_done():
        assert time.monotonic() < deadline
        there.controller.reconcile()
        time.sleep(0.05)


@pytest.mark.parametrize("columns", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("state", [JobState.STARTING, JobState.DONE])
def test_a_job_that_cannot_be_read_is_listed_as_such_with_all_others(
    tmp_path: Path, columns: str, state: JobState
) -> None:
    with app_server(tmp_path) as there:
        bad = submitted(there, SLEEPS if state == JobState.STARTING else "print(1)")
        turned_until(there, bad, state)
        clean = submitted(there, "print(2)")
        damaged(there, bad, columns)
        assert [there.ask("dee", "GET", path).status_code for path in READS] == [200] * 3
        jobs = listed(there)
        assert (jobs[clean]["server_error"], jobs[bad]["name"], jobs[bad]["user"]) == ("", "x", "ben")
        assert jobs[bad]["server_error"]
        assert there.ask("dee", "GET", f"/api/jobs/{bad}").json()["server_error"]
        assert turned_until(there, clean, *ENDED).state == JobState.DONE


@pytest.mark.parametrize("columns", ENDS_TEAM.values(), ids=ENDS_TEAM)
def test_the_team_of_a_running_job_that_cannot_be_read_is_ended(tmp_path: Path, columns: str) -> None:
    with app_server(tmp_path, devices=1) as there:
        bad = submitted(there, SLEEPS)
        turned_until(there, bad, JobState.STARTING)
        damaged(there, bad, columns)
        clean = submitted(there, "print(2)")
        turned(there, lambda: all(state.has_ended for state in there.context.launcher.states().values()))
        assert turned_until(there, clean, *ENDED).state == JobState.DONE


@pytest.mark.parametrize("columns", DAMAGES.values(), ids=DAMAGES)
def test_a_running_job_that_cannot_be_read_can_be_cancelled(tmp_path: Path, columns: str) -> None:
    with app_server(tmp_path) as there:
        bad = submitted(there, SLEEPS)
        turned_until(there, bad, JobState.STARTING)
        damaged(there, bad, columns)
        assert there.ask("cho", "POST", f"/api/jobs/{bad}/cancel").status_code == 403
        assert there.ask("ben", "POST", f"/api/jobs/{bad}/cancel").status_code == 200
        turned(there, lambda: all(state.has_ended for state in there.context.launcher.states().values()))
        turned(there, lambda: listed(there)[bad]["state"] in ENDED)


def test_a_page_of_unreadable_jobs_leads_to_the_next(tmp_path: Path) -> None:
    with app_server(tmp_path) as there:
        numbers = [submitted(there, "print(1)") for _ in range(4)]
        for number in numbers[2:]:
            damaged(there, number, "arguments = '{broken'")
        page = there.ask("dee", "GET", "/api/jobs?limit=2").json()
        assert ([job["id"] for job in page["jobs"]], page["more"]) == (numbers[:1:-1], 2)
        page = there.ask("dee", "GET", f"/api/jobs?limit=2&before={page['next_before']}").json()
        assert ([job["id"] for job in page["jobs"]], page["more"]) == (numbers[1::-1], 0)


@pytest.mark.parametrize("stored", ["[{}]", "{br"])
def test_checkpoints_that_cannot_be_read_do_not_hide_their_job(tmp_path: Path, stored: str) -> None:
    with app_server(tmp_path) as there:
        bad = submitted(there, "print(1)")
        damaged(there, bad, f"checkpoints = '{stored}'")
        found = there.ask("dee", "GET", f"/api/jobs/{bad}").json()
        assert (found["id"], found["resumes_from"]) == (bad, None)


@pytest.mark.parametrize("columns", ["kind = 'foo'", "data = '{br'", "state = 'weird'", "at = 1e300"])
def test_an_event_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path, columns: str) -> None:
    with app_server(tmp_path) as there:
        number = submitted(there, "print(1)")
        turned_until(there, number, *ENDED)
        before = there.ask("dee", "GET", f"/api/jobs/{number}/events").json()
        execute(there, f"UPDATE events SET {columns} WHERE id = {before[0]['id']}")
        assert there.ask("dee", "GET", f"/api/jobs/{number}/events").json() == before[1:]


@pytest.mark.parametrize("columns", ["devices = '{br'", "devices = '[]'", "seen_at = 1e300"])
def test_a_node_that_cannot_be_read_is_written_again(tmp_path: Path, columns: str) -> None:
    """The launcher knows what the node has; one that it no longer lists is left out."""
    with app_server(tmp_path) as there:
        there.controller.refresh_nodes()
        (before,) = there.ask("dee", "GET", "/api/nodes").json()
        gone = "INSERT INTO nodes (name, address, rack, devices, seen_at) VALUES ('gone', '', '', '{br', 1.0)"
        execute(there, gone)
        execute(there, f"UPDATE nodes SET {columns} WHERE name = '{before['name']}'")
        assert [there.ask("dee", "GET", path).status_code for path in READS] == [200] * 3

        def is_back() -> bool:
            there.controller.refresh_nodes()
            return [node["devices"] for node in there.ask("dee", "GET", "/api/nodes").json()] == [before["devices"]]

        turned(there, is_back)
        number = submitted(there, "print(1)")
        assert turned_until(there, number, *ENDED).state == JobState.DONE


def test_a_job_is_submitted_although_nodes_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unlisted(_: Client) -> None:
        raise WorldError("internal error")

    class Reached(Exception):  # noqa: N818 (no error: the submission goes on)
        pass

    def reached(*_: object) -> None:
        raise Reached

    monkeypatch.setenv("MIMATRIX_SERVER", "http://127.0.0.1:1")
    monkeypatch.setenv("MIMATRIX_TOKEN", "x")
    monkeypatch.setattr(Client, "nodes", unlisted)
    monkeypatch.setattr(Client, "has_code_archive", reached)
    script = tmp_path / "x.py"
    script.write_text("print(1)")
    assert isinstance(CliRunner().invoke(app, ["submit", str(script)]).exception, Reached)
