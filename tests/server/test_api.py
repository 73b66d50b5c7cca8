"""The REST interface: who may do what, what is refused and how, and that nothing breaks it."""

import hashlib
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.databases import database, postgresql
from support.documents import plan, profile
from support.servers import AppServer, app_server

from mimatrix.api.models import PROTOCOL, EventKind, JobState, Role
from mimatrix.server.auth.tokens import issue
from mimatrix.server.db.models import JobRow
from mimatrix.server.jobs.events import JobEvent
from mimatrix.server.jobs.lifecycle import transition

__all__ = ["database", "postgresql"]  # fixtures, for pytest to find

ARCHIVE = b"not really an archive, but the server does not look inside"
DIGEST = hashlib.sha256(ARCHIVE).hexdigest()
TESTED = JobEvent(EventKind.WAITING, "test")
JOB: dict[str, Any] = {"name": "x", "script": "x.py", "code_archive": DIGEST}


@pytest.fixture
def there(tmp_path: Path, database: str) -> Iterator[AppServer]:
    with app_server(tmp_path, database) as found:
        assert found.ask("ben", "PUT", f"/api/code-archives/{DIGEST}", content=ARCHIVE).status_code == 204
        yield found


def submitted(there: AppServer, who: str = "ben", **more: Any) -> int:
    answer = there.ask(who, "POST", "/api/jobs", json={**JOB, **more})
    assert answer.status_code == 201, answer.text
    number: int = answer.json()["id"]
    return number


def worker(there: AppServer, number: int, devices: tuple[str, ...] = ("n/0", "n/1")) -> dict[str, str]:
    """Let a job run, and return the token of a worker of it."""
    with there.context.sessions.begin() as session:
        job = session.get_one(JobRow, number)
        job.allocation = list(devices)
        transition(session, job, JobState.STARTING, TESTED, 1.0)
        _, secret = issue(session, "ben", Role.WORKER, 1.0, number)
    there.context.live.begin(number, 1, devices)
    there.secrets[f"worker-{number}"] = secret
    return {"Authorization": f"Bearer {secret}"}


@pytest.mark.wording
def test_a_job_is_handed_in_seen_and_cancelled(there: AppServer) -> None:
    number = submitted(there, devices="2..4", priority=70)
    found = there.ask("dee", "GET", f"/api/jobs/{number}").json()
    assert (found["state"], found["user"], found["devices"], found["priority"]) == ("queued", "ben", "2..4", 70)
    assert there.ask("ben", "PATCH", f"/api/jobs/{number}", json={"priority": 10}).json()["priority"] == 10
    assert there.ask("ben", "POST", f"/api/jobs/{number}/cancel").json()["state"] == "cancelled"
    assert there.ask("ben", "POST", f"/api/jobs/{number}/cancel").status_code == 409
    assert there.ask("ben", "POST", f"/api/jobs/{number}/retry").json()["state"] == "queued"
    reasons = [event["reason"] for event in there.ask("ben", "GET", f"/api/jobs/{number}/events").json()]
    assert reasons == ["submitted by ben", "priority 10, by ben", "cancelled by ben", "requeued by ben"]


def test_a_submission_that_is_repeated_with_its_key_is_one_job(there: AppServer) -> None:
    first = submitted(there, key="once")
    assert submitted(there, key="once") == first
    assert submitted(there, key="twice") != first
    assert submitted(there, "cho", key="once") != first
    assert submitted(there) != submitted(there)


def test_pages_of_jobs(there: AppServer) -> None:
    numbers = [submitted(there, who) for who in ("ben", "cho", "ben", "ben", "cho")]
    first = there.ask("ben", "GET", "/api/jobs?limit=3").json()
    assert [job["id"] for job in first["jobs"]] == numbers[:1:-1]
    rest = there.ask("ben", "GET", f"/api/jobs?limit=3&before={first['next_before']}").json()
    assert [job["id"] for job in rest["jobs"]] == numbers[1::-1]
    assert rest["next_before"] is None
    assert (first["more"], rest["more"]) == (2, 0)
    assert there.ask("ben", "GET", "/api/jobs?limit=1&user=cho").json()["more"] == 1
    assert there.ask("ben", "GET", "/api/jobs?limit=5").json()["next_before"] is None
    assert len(there.ask("ben", "GET", "/api/jobs?user=cho&state=queued").json()["jobs"]) == 2
    assert there.ask("ben", "GET", "/api/jobs?state=done").json()["jobs"] == []


def test_the_page_of_the_interface_has_it_all_and_asks_nobody_else(there: AppServer) -> None:
    answer = there.http.get("/docs")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    for path, methods in there.http.get("/openapi.json").json()["paths"].items():
        for method in methods:
            assert f"<code>{method.upper()} {path}</code>" in answer.text
    assert "<code>limit</code> (query): integer from 1 to 1000" in answer.text
    assert "<code>code_archive</code> (body, required): string" in answer.text
    assert "<code>state</code> (query): array of queued or starting or " in answer.text
    assert "<code>priority</code> (body, required): integer from 0 to 100<" in answer.text
    assert "Change a job&#x27;s priority." in answer.text
    assert '<a href="openapi.json">' in answer.text
    assert "://" not in answer.text
    assert "<script" not in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize(
    ("asked", "kept"), [("1,1,1", "3"), ("a100:1,A100:2..4,v100:1", "a100:3..5,v100:1"), ("1,cpu:1,2", "3,cpu:1")]
)
def test_the_same_kind_asked_for_again_is_merged(there: AppServer, asked: str, kept: str) -> None:
    number = submitted(there, devices=asked)
    assert there.ask("ben", "GET", f"/api/jobs/{number}").json()["devices"] == kept


@pytest.mark.wording
def test_merged_devices_have_a_most_too(there: AppServer) -> None:
    answer = there.ask("ben", "POST", "/api/jobs", json={**JOB, "devices": "65536,65536"})
    assert answer.status_code == 422
    assert "names no devices" in answer.json()["detail"]


BEARERS = {
    "admin": "ann",
    "user": "ben",
    "viewer": "dee",
    "other": "cho",
    "worker": "worker-of-this-job",
    "other worker": "worker-of-another-job",
    "nobody": "",
}
EVERY_ROLE = set(BEARERS)
ROUTES: dict[tuple[str, str], set[str]] = {
    ("GET", "/"): EVERY_ROLE,
    ("HEAD", "/"): EVERY_ROLE,
    ("GET", "/dashboard/{name:path}"): EVERY_ROLE,
    ("HEAD", "/dashboard/{name:path}"): EVERY_ROLE,
    ("GET", "/docs"): EVERY_ROLE,
    ("GET", "/openapi.json"): EVERY_ROLE,
    ("HEAD", "/openapi.json"): EVERY_ROLE,
    ("GET", "/healthz"): EVERY_ROLE,
    ("GET", "/readyz"): EVERY_ROLE,
    ("HEAD", "/api/code-archives/{digest}"): {"admin", "user", "other"},
    ("PUT", "/api/code-archives/{digest}"): {"admin", "user", "other"},
    ("POST", "/api/jobs"): {"admin", "user", "other"},
    ("POST", "/api/jobs/dry-run"): {"admin", "user", "other"},
    ("GET", "/api/jobs"): {"admin", "user", "viewer", "other"},
    ("GET", "/api/jobs/{number}"): {"admin", "user", "viewer", "other"},
    ("GET", "/api/jobs/{number}/events"): {"admin", "user", "viewer", "other"},
    ("GET", "/api/jobs/{number}/log"): {"admin", "user", "viewer", "other"},
    ("GET", "/metrics"): {"admin", "user", "viewer", "other"},
    ("GET", "/api/me"): {"admin", "user", "viewer", "other"},
    ("GET", "/api/jobs/{number}/ranks"): {"admin", "user", "viewer", "other"},
    ("GET", "/api/jobs/{number}/history"): {"admin", "user", "viewer", "other"},
    ("GET", "/api/jobs/{number}/plan"): {"admin", "user", "viewer", "other"},
    ("GET", "/api/jobs/{number}/checkpoints"): {"admin", "user", "viewer", "other"},
    ("GET", "/api/usage"): {"admin", "user", "viewer", "other"},
    ("GET", "/api/devices/{node}/{number}"): {"admin", "user", "viewer", "other"},
    ("GET", "/api/devices/{node}/{number}/usage"): {"admin", "user", "viewer", "other"},
    ("PATCH", "/api/jobs/{number}"): {"admin", "user"},
    ("POST", "/api/jobs/{number}/cancel"): {"admin", "user"},
    ("POST", "/api/jobs/{number}/retry"): {"admin", "user"},
    ("POST", "/api/jobs/{number}/join"): {"worker"},
    ("POST", "/api/jobs/{number}/report"): {"worker"},
    ("PUT", "/api/jobs/{number}/profile"): {"worker"},
    ("PUT", "/api/jobs/{number}/plan"): {"worker"},
    ("PUT", "/api/jobs/{number}/checkpoints"): {"worker"},
    ("GET", "/api/nodes"): {"admin", "user", "viewer", "other"},
    ("GET", "/api/tokens"): {"admin"},
    ("POST", "/api/tokens"): {"admin"},
    ("DELETE", "/api/tokens/{number}"): {"admin"},
    ("GET", "/api/audit"): {"admin"},
}
"""Who is let in: the owner of the job is `user`, and `other` is another user."""
BODIES: dict[str, Any] = {
    "/api/jobs": JOB,
    "/api/jobs/dry-run": JOB,
    "/api/jobs/{number}": {"priority": 1},
    "/api/jobs/{number}/join": {"protocol": PROTOCOL, "generation": 1, "rank": 0, "address": "127.0.0.1", "port": 5},
    "/api/jobs/{number}/report": {"protocol": PROTOCOL, "generation": 1, "rank": 0, "state": "training"},
    "/api/jobs/{number}/profile": {"protocol": PROTOCOL, "generation": 1, "content": profile()},
    "/api/jobs/{number}/plan": {"protocol": PROTOCOL, "generation": 1, "content": plan()},
    "/api/jobs/{number}/checkpoints": {"protocol": PROTOCOL, "generation": 1, "checkpoints": []},
    "/api/tokens": {"user": "eve", "role": "viewer"},
}


def test_every_route_is_in_the_matrix(there: AppServer) -> None:
    app: Any = there.http.app
    # Newer versions of FastAPI keep the routes of an included router within one entry.
    routes = [inner for route in app.routes for inner in getattr(route, "routes", [route])]
    found = {(method, route.path) for route in routes for method in getattr(route, "methods", None) or ()}
    described = there.http.get("/openapi.json").json()["paths"]
    found |= {(method.upper(), path) for path, methods in described.items() for method in methods}
    assert found == set(ROUTES)


def test_who_may_do_what(there: AppServer) -> None:
    for (method, path), allowed in ROUTES.items():
        for role, bearer in BEARERS.items():
            number, another = submitted(there), submitted(there)
            worker(there, number)
            worker(there, another)
            if path.endswith("retry"):
                with there.context.sessions.begin() as session:
                    transition(session, session.get_one(JobRow, number), JobState.DONE, TESTED, 2.0)
            workers = {"worker": f"worker-{number}", "other worker": f"worker-{another}"}
            who = workers.get(role, bearer)
            with there.context.sessions.begin() as session:
                session.get_one(JobRow, number).plan = {}
                token = issue(session, "x", Role.VIEWER, 1.0)[0].id
            where = path.replace(":path", "").format(
                number=token if "tokens" in path else number, digest=DIGEST, node="n", name="app.js"
            )
            body = {"content": ARCHIVE} if method == "PUT" and "code-archives" in path else {"json": BODIES.get(path)}
            there.context.authenticator._failures.clear()
            answer = there.ask(who, method, where, **body)
            if role in allowed:
                assert answer.status_code < 300, f"{role} {method} {path}: {answer.status_code} {answer.text}"
            else:
                wanted = 401 if role == "nobody" else 403
                assert answer.status_code == wanted, f"{role} {method} {path}: {answer.status_code} {answer.text}"


@pytest.mark.wording
def test_a_worker_has_no_business_with_another_job(there: AppServer) -> None:
    mine, other = submitted(there), submitted(there)
    worker(there, mine)
    worker(there, other)
    body = {"protocol": PROTOCOL, "generation": 1, "rank": 0, "state": "training"}
    answer = there.ask(f"worker-{mine}", "POST", f"/api/jobs/{other}/report", json=body)
    assert answer.status_code == 403
    assert f"not valid for job {other}" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("change", "status", "sentence"),
    [
        ({"generation": 2}, 409, "generation 2 of job 1 does not run"),
        ({"protocol": 99}, 409, f"the server has protocol version {PROTOCOL} and the worker 99"),
        ({"state": "napping"}, 422, "state: input should be"),
        ({"step": -1}, 422, "step: input should be greater than or equal to 0"),
        ({"metrics": {str(number): 1.0 for number in range(40)}}, 422, "metrics: dictionary should have at most 32"),
        ({"tensor": [1, 2]}, 422, "tensor: extra inputs are not permitted"),
    ],
)
@pytest.mark.wording
def test_reports_that_are_refused(there: AppServer, change: dict[str, Any], status: int, sentence: str) -> None:
    number = submitted(there)
    worker(there, number)
    body = {"protocol": PROTOCOL, "generation": 1, "rank": 0, "state": "training", **change}
    answer = there.ask(f"worker-{number}", "POST", f"/api/jobs/{number}/report", json=body)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert sentence in answer.json()["detail"]


def test_joining_gives_the_place_of_rank_0(there: AppServer) -> None:
    number = submitted(there)
    worker(there, number, ("a/0", "b/0", "b/1"))
    path, say = f"/api/jobs/{number}/join", {"protocol": PROTOCOL, "generation": 1}
    early = there.ask(f"worker-{number}", "POST", path, json={**say, "rank": 2, "address": "10.0.0.2"}).json()
    assert (early["master_port"], early["ranks"], early["local_rank"], early["local_ranks"]) == (0, 3, 1, 2)
    there.ask(f"worker-{number}", "POST", path, json={**say, "rank": 0, "address": "10.0.0.1", "port": 4242})
    found = there.ask(f"worker-{number}", "POST", path, json={**say, "rank": 1, "address": "10.0.0.2"}).json()
    assert (found["master_address"], found["master_port"], found["local_rank"]) == ("10.0.0.1", 4242, 0)
    assert there.ask(f"worker-{number}", "POST", path, json={**say, "rank": 3}).status_code == 422


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"devices": "0"}, 'devices: "0" names no devices; write a number'),
        ({"name": ""}, "name: "),
        ({"name": "../x"}, "name: "),
        ({"script": "../../etc/passwd"}, "script: "),
        ({"script": "/etc/passwd"}, "script: "),
        ({"priority": 101}, "priority: "),
        ({"environment": {"A B": "1"}}, "environment.A B"),
        ({"code_archive": "abc"}, "code_archive: "),
        ({"max_time_s": -1}, "max_time_s: "),
        ({"max_time_s": "NaN"}, "max_time_s: "),
        ({"name": "ünï"}, "name: use letters of ASCII"),
        ({"colour": "red"}, "colour: extra inputs are not permitted"),
    ],
)
@pytest.mark.wording
def test_bad_jobs_get_one_sentence(there: AppServer, change: dict[str, Any], sentence: str) -> None:
    answer = there.ask("ben", "POST", "/api/jobs", json={**JOB, **change})
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith(sentence)


def test_bodies_are_bounded_and_must_be_json(there: AppServer) -> None:
    number = submitted(there)
    worker(there, number)
    path = f"/api/jobs/{number}/report"
    large = {"protocol": PROTOCOL, "generation": 1, "rank": 0, "state": "training", "metrics": {"x" * 17000: 1.0}}
    assert there.ask(f"worker-{number}", "POST", path, json=large).status_code == 413
    assert there.ask("ben", "POST", "/api/jobs", content=b"{").status_code == 422
    assert there.ask("ben", "POST", "/api/jobs", content=b"\xff" * 10).status_code in (400, 422)
    assert there.ask("ben", "POST", "/api/jobs", content=b"[" * 100_000).status_code in (400, 422)
    assert there.ask("ben", "POST", "/api/jobs", content=b" " * (5 << 20)).status_code == 413


@pytest.mark.wording
def test_an_archive_must_be_what_it_says(there: AppServer) -> None:
    assert there.ask("ben", "PUT", f"/api/code-archives/{'1' * 64}", content=b"other").status_code == 422
    assert there.ask("ben", "HEAD", f"/api/code-archives/{'1' * 64}").status_code == 404
    assert there.ask("ben", "PUT", "/api/code-archives/..%2f..%2fetc", content=b"x").status_code in (404, 422)
    answer = there.ask("ben", "POST", "/api/jobs", json={**JOB, "code_archive": "1" * 64})
    assert answer.status_code == 409
    assert "was not uploaded" in answer.json()["detail"]


@pytest.mark.wording
def test_guessing_is_stopped(there: AppServer) -> None:
    for _ in range(10):
        assert there.http.get("/api/jobs", headers={"Authorization": "Bearer wrong"}).status_code == 401
    answer = there.http.get("/api/jobs", headers={"Authorization": "Bearer wrong"})
    assert answer.status_code == 429
    assert answer.json()["detail"].endswith("try again in a minute")


def test_who_guesses_does_not_lock_others_out(there: AppServer) -> None:
    for _ in range(12):
        there.http.get("/api/jobs", headers={"Authorization": "Bearer wrong"})
    there.context.authenticator.clear()
    assert there.ask("ben", "GET", "/api/jobs").status_code == 200


def test_a_token_that_was_ended_lets_nobody_in(there: AppServer) -> None:
    made = there.ask("ann", "POST", "/api/tokens", json={"user": "eve", "role": "user"}).json()
    there.secrets["eve"] = made["secret"]
    assert there.ask("eve", "GET", "/api/jobs").status_code == 200
    assert there.ask("ann", "DELETE", f"/api/tokens/{made['id']}").status_code == 204
    assert there.ask("eve", "GET", "/api/jobs").status_code == 401
    listed = there.ask("ann", "GET", "/api/tokens").json()
    assert "eve" not in [token["user"] for token in listed]
    assert not any(token["secret"] for token in listed)


def test_changes_are_written_down_and_secrets_are_not(there: AppServer) -> None:
    number = submitted(there)
    there.ask("cho", "POST", f"/api/jobs/{number}/cancel")
    entries = there.ask("ann", "GET", "/api/audit").json()
    assert [(entry["user"], entry["action"], entry["status"]) for entry in entries[:2]] == [
        ("cho", f"POST /api/jobs/{number}/cancel", 403),
        ("ben", "POST /api/jobs", 201),
    ]
    assert there.secrets["cho"] not in json.dumps(entries)


@pytest.mark.wording
def test_unknown_places_are_problems_too(there: AppServer) -> None:
    for method, path in product(("GET", "POST"), ("/api/nothing", "/nothing")):
        answer = there.ask("ann", method, path)
        assert answer.status_code == 404
        assert answer.headers["content-type"] == "application/problem+json"
    assert there.ask("ann", "DELETE", "/api/jobs").status_code == 405
    assert there.ask("ann", "GET", "/api/jobs/12345").json()["detail"] == "there is no job 12345; see mimatrix jobs"
