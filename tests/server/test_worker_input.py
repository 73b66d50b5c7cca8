"""What a worker sends is checked when it comes in: nothing that it stores can break a later computation."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.documents import plan, profile
from support.servers import AppServer, app_server
from test_api import ARCHIVE, DIGEST, submitted, worker

from mimatrix.api.models import PROTOCOL, JobProgress, JobState


@pytest.fixture
def there(tmp_path: Path) -> Iterator[AppServer]:
    with app_server(tmp_path) as found:
        assert found.ask("ben", "PUT", f"/api/code-archives/{DIGEST}", content=ARCHIVE).status_code == 204
        yield found


def put(there: AppServer, number: int, what: str, content: object) -> Any:
    text = json.dumps({"protocol": PROTOCOL, "generation": 1, "content": content})
    headers = {**there.headers(f"worker-{number}"), "Content-Type": "application/json"}
    return there.http.put(f"/api/jobs/{number}/{what}", content=text, headers=headers)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def report(there: AppServer, number: int, **more: Any) -> Any:
    body = {"protocol": PROTOCOL, "generation": 1, "rank": 0, "state": "training", **more}
    return there.ask(f"worker-{number}", "POST", f"/api/jobs/{number}/report", json=body)


def started(there: AppServer) -> int:
    number = submitted(there)
    worker(there, number)
    return number


def test_a_plan_and_a_profile_of_a_worker_are_stored(there: AppServer) -> None:
    number = started(there)
    assert put(there, number, "plan", plan()).status_code == 204
    assert put(there, number, "profile", profile()).status_code == 204
    stored = there.ask("dee", "GET", f"/api/jobs/{number}/plan").json()["content"]
    assert (stored["split"], stored["parts"][1]["name"]) == ([[4], [4]], "n/1")


@pytest.mark.parametrize(
    "content",
    [
        {},
        plan(split=[[10**400], [4]]),
        plan(split=[[4], ["4"]]),
        plan(step_s=-1),
        plan(step_s=10**30),
        plan(parts=[{**plan()["parts"][0], "busy_s": 1e-300}] * 2),
        plan(extra=nested(60)),
        plan(reasons=["x" * 5000]),
        [],
    ],
    ids=lambda content: str(content)[:20],
)
def test_a_plan_that_cannot_be_computed_with_is_refused(there: AppServer, content: object) -> None:
    number = started(there)
    assert put(there, number, "plan", content).status_code == 422
    assert there.ask("dee", "GET", f"/api/jobs/{number}/plan").status_code == 404


@pytest.mark.parametrize(
    "content",
    [{}, {"profiles": []}, profile(seconds=[[10**400, 1.0]]), profile(noise=nested(60)), profile(seconds=[[1, 0.0]])],
    ids=lambda content: str(content)[:20],
)
def test_a_profile_that_cannot_be_computed_with_is_refused(there: AppServer, content: object) -> None:
    number = started(there)
    assert put(there, number, "profile", content).status_code == 422


def test_the_progress_of_a_job_holds_the_sum_of_what_its_groups_report(there: AppServer) -> None:
    number = started(there)
    for rank in range(2):
        assert report(there, number, rank=rank, group=rank, samples_per_s=1e9).status_code == 200
    total = there.context.live.all()[number].samples_per_s
    assert JobProgress(samples_per_s=total).samples_per_s == 2e9


def test_control_characters_of_a_worker_reach_no_log_and_no_terminal(there: AppServer) -> None:
    number = started(there)
    evil = "all_reduce\nthe token of root\x1b]0;title\x07\x1b[31m!"
    said = {"call": evil, "round": 0, "peer": None, "seconds": 1.0}
    assert report(there, number, waiting=said, metrics={"lo\x1b[2Jss\r": 1.0}).status_code == 200
    live = there.context.live.all()[number].reports[0]
    assert live.waiting is not None
    assert live.waiting.call == "all_reduce the token of root!"
    assert list(live.metrics) == ["loss"]
    assert report(there, number, metrics={"\x1b[2J": 1.0}).status_code == 422


@pytest.mark.wording
def test_control_characters_in_the_reason_of_a_plan_are_removed(there: AppServer) -> None:
    number = started(there)
    assert put(there, number, "plan", plan(reasons=["a\x1b[31mb\nc"], why="slow\x1b[2J\nrank")).status_code == 204
    stored = there.ask("dee", "GET", f"/api/jobs/{number}/plan").json()["content"]
    assert stored["reasons"] == ["ab c"]
    assert there.ask("dee", "GET", f"/api/jobs/{number}/events").json()[-1]["reason"].endswith("slow rank")


@pytest.mark.parametrize("address", ["10.0.0.1\nX=1", "a b", "$(reboot)"])
def test_an_address_is_the_address_of_a_host(there: AppServer, address: str) -> None:
    number = started(there)
    body = {"protocol": PROTOCOL, "generation": 1, "rank": 0, "address": address, "port": 5}
    assert there.ask(f"worker-{number}", "POST", f"/api/jobs/{number}/join", json=body).status_code == 422


@pytest.mark.parametrize("value", [10**400, 1e400, float("nan")])
def test_a_metric_is_finite_or_null(there: AppServer, value: float) -> None:
    number = started(there)
    text = json.dumps(
        {"protocol": PROTOCOL, "generation": 1, "rank": 0, "state": JobState.TRAINING, "metrics": {"loss": value}}
    )
    headers = {**there.headers(f"worker-{number}"), "Content-Type": "application/json"}
    answer = there.http.post(f"/api/jobs/{number}/report", content=text, headers=headers)
    assert answer.status_code == 422
