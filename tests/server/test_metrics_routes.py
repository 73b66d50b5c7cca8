"""What people look at: ranks, history, who is slow and who does not come."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, update
from support.documents import plan
from support.servers import AppServer, app_server
from test_api import ARCHIVE, DIGEST, TESTED, submitted, worker
from test_controller import Clock, reasons

from mimatrix.api.models import PROTOCOL, JobState
from mimatrix.monitor.downsampling import TIERS
from mimatrix.server.db.models import AllocationRow, JobRow, SampleRow
from mimatrix.server.jobs.lifecycle import transition


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def there(tmp_path: Path, clock: Clock) -> Iterator[AppServer]:
    with app_server(tmp_path, clock=clock) as found:
        assert found.ask("ben", "PUT", f"/api/code-archives/{DIGEST}", content=ARCHIVE).status_code == 204
        yield found


def training(there: AppServer) -> int:
    number = submitted(there)
    worker(there, number)
    with there.context.sessions.begin() as session:
        session.get_one(JobRow, number).started_at = there.context.clock()
    return number


def reported(there: AppServer, number: int, rank: int, **more: Any) -> dict[str, Any]:
    body = {
        "protocol": PROTOCOL,
        "generation": 1,
        "rank": rank,
        "state": "training",
        "step": 7,
        "step_s": 0.25,
        "samples_per_s": 400.0,
        "compute_s": 0.1,
        "waiting_s": 0.1,
        "metrics": {"loss": 0.5},
        **more,
    }
    answer = there.ask(f"worker-{number}", "POST", f"/api/jobs/{number}/report", json=body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def watched(there: AppServer, clock: Clock, seconds: int, number: int, **slow: Any) -> list[str]:
    """Report for `seconds`, rank 1 with what is given, and return the notices that rank 0 got."""
    notices = []
    for _ in range(seconds):
        clock.ahead_s += 1
        notices.append(reported(there, number, 0)["notice"])
        reported(there, number, 1, **slow)
        there.controller.check_stragglers()
    return [each for each in notices if each]


def test_ranks_as_they_are_now(there: AppServer) -> None:
    number = training(there)
    reported(there, number, 0, use={"busy": 0.5, "memory_bytes": 10}, samples=32)
    found = there.ask("dee", "GET", f"/api/jobs/{number}/ranks").json()
    (rank,) = found["ranks"]
    assert (rank["device"], rank["step"], rank["compute_s"], rank["samples"]) == ("n/0", 7, 0.1, 32)
    assert rank["use"]["busy"] == 0.5
    assert found["stragglers"] == []
    queued = submitted(there)
    assert there.ask("dee", "GET", f"/api/jobs/{queued}/ranks").json() == {"ranks": [], "stragglers": []}


@pytest.mark.wording
def test_a_slow_rank_is_named_in_events_log_and_answer(there: AppServer, clock: Clock) -> None:
    number = training(there)
    assert watched(there, clock, 8, number) == []
    (notice,) = watched(there, clock, 8, number, compute_s=0.2, waiting_s=0.0)
    assert notice.startswith("the others are idle because of rank 1 on n/1: 100ms (40%) of every step")
    (trouble,) = there.ask("dee", "GET", f"/api/jobs/{number}/ranks").json()["stragglers"]
    assert (trouble["kind"], trouble["rank"], trouble["cause"]) == ("slow", 1, "compute")
    assert trouble["sentence"] == notice
    assert reasons(there, number).count(notice) == 1
    assert watched(there, clock, 4, number) == []
    assert there.ask("dee", "GET", f"/api/jobs/{number}/ranks").json()["stragglers"] == []


@pytest.mark.wording
def test_a_rank_that_does_not_come_is_named(there: AppServer, clock: Clock) -> None:
    number = training(there)
    reported(there, number, 1)
    waiting = {"call": "all_reduce of 8 float32 (sum, gdraa)", "round": 1, "peer": 1, "seconds": 0.5}
    for seconds in range(12):
        clock.ahead_s += 1
        reported(there, number, 0, waiting={**waiting, "seconds": seconds + 0.5})
        there.controller.check_stragglers()
    (trouble,) = there.ask("dee", "GET", f"/api/jobs/{number}/ranks").json()["stragglers"]
    assert trouble["kind"] == "hang"
    assert (
        "rank 1 on n/1 has not entered all_reduce of 8 float32 (sum, gdraa), round 1, in step 7" in trouble["sentence"]
    )
    (said,) = (said for said in reasons(there, number) if "has not entered" in said)
    assert said.endswith("rank 0 waits for it")


def test_groups_that_do_not_wait_for_each_other_are_not_compared(there: AppServer, clock: Clock) -> None:
    number = training(there)
    for _ in range(20):
        clock.ahead_s += 1
        reported(there, number, 0, group=0, compute_s=0.1)
        waiting = {"call": "all_reduce", "round": 0, "peer": 0, "seconds": 60.0}
        reported(there, number, 1, group=1, compute_s=0.2, waiting=waiting)
        there.controller.check_stragglers()
    assert there.ask("dee", "GET", f"/api/jobs/{number}/ranks").json()["stragglers"] == []


def test_history_is_kept_thinned_and_forgotten(there: AppServer, clock: Clock) -> None:
    number = training(there)
    for minute in range(3 * 12):
        clock.ahead_s += 5
        reported(there, number, 0, step=minute, step_s=0.2 if minute % 2 else 0.4)
        there.controller.keep_history()
    found = there.ask("dee", "GET", f"/api/jobs/{number}/history?points=1000").json()
    assert len(found["points"]) == 36
    assert found["points"][-1]["metrics"] == {"loss": 0.5}
    assert found["points"][-1]["ranks"]["compute_s"] == [0.1, None]
    fewer = there.ask("dee", "GET", f"/api/jobs/{number}/history?points=9").json()["points"]
    assert len(fewer) <= 9
    assert [point["step_s"] for point in fewer[:-1]] == pytest.approx([0.3] * (len(fewer) - 1))
    lean = there.ask("dee", "GET", f"/api/jobs/{number}/history?points=9&ranks=last").json()["points"]
    assert lean == [{**point, "ranks": {}} for point in fewer[:-1]] + fewer[-1:]
    with there.context.sessions() as session:
        counted = select(SampleRow.tier, func.count()).where(SampleRow.job == number).group_by(SampleRow.tier)
        tiers = [tuple(row) for row in session.execute(counted)]
    assert sorted(tiers) == [(0, 36), (1, 2)]
    clock.ahead_s += TIERS[0].kept_s + 61
    there.controller.keep_history()
    there.controller.delete_old()
    with there.context.sessions() as session:
        oldest = session.scalar(select(func.min(SampleRow.at)).where(SampleRow.tier == 0))
    assert oldest is not None
    assert oldest > there.context.clock() - TIERS[0].kept_s


def test_the_history_of_groups_says_which_ranks_they_have(there: AppServer, clock: Clock) -> None:
    """A job that was submitted without groups may form them, and has ended when it is looked at."""
    number = training(there)
    for groups in ((0, 0), (0, 1)):
        for rank, group in enumerate(groups):
            reported(there, number, rank, group=group)
        clock.ahead_s += 5
        there.controller.keep_history()
    points = there.ask("dee", "GET", f"/api/jobs/{number}/history").json()["points"]
    assert [point["ranks"].get("group") for point in points] == [None, [0.0, 1.0]]


def test_use_of_the_cluster_and_of_a_device(there: AppServer, clock: Clock) -> None:
    number = training(there)
    there.controller.refresh_nodes()
    for used in (2, 2, 0):
        if not used:
            with there.context.sessions.begin() as session:
                transition(
                    session,
                    session.get_one(JobRow, number),
                    JobState.DONE,
                    TESTED,
                    clock(),
                )
        clock.ahead_s += 6
        there.controller.keep_history()
    points = there.ask("dee", "GET", "/api/usage?hours=1").json()
    assert [(point["devices"], point["used"]) for point in points] == [(4, 2), (4, 2), (4, 0)]
    found = there.ask("dee", "GET", "/api/devices/n/1").json()
    assert [(job["id"], job["state"], job["ended_at"] is None) for job in found["jobs"]] == [(number, "done", False)]
    assert there.ask("dee", "GET", "/api/devices/n/7").json()["jobs"] == []


def test_a_device_over_time_is_a_rank_of_one_job_after_another(there: AppServer, clock: Clock) -> None:
    def run(number: int, devices: tuple[str, ...], busy: tuple[float, ...]) -> None:
        worker(there, number, devices)
        with there.context.sessions.begin() as session:
            session.execute(update(AllocationRow).where(AllocationRow.job == number).values(started_at=clock()))
        for _ in range(3):
            clock.ahead_s += 6
            for rank, each in enumerate(busy):
                reported(there, number, rank, use={"busy": each, "memory_bytes": 1000 + rank})
            there.controller.keep_history()
        with there.context.sessions.begin() as session:
            transition(session, session.get_one(JobRow, number), JobState.DONE, TESTED, clock())
        there.context.live.forget(number)
        clock.ahead_s += 60

    run(submitted(there), ("n/0", "n/1"), (0.25, 0.5))
    run(submitted(there), ("n/1", "n/2"), (0.75, 1.0))
    found = there.ask("dee", "GET", "/api/devices/n/1/usage").json()
    assert [point["busy"] for point in found] == [0.5, 0.5, 0.5, None, 0.75, 0.75, 0.75, None]
    assert [point["memory_bytes"] for point in found[:5]] == [1001, 1001, 1001, None, 1000]
    assert [point["at"] for point in found] == sorted(point["at"] for point in found)
    assert found[0]["power_w"] is None
    assert len(there.ask("dee", "GET", "/api/devices/n/1/usage?points=3").json()) <= 3
    assert there.ask("dee", "GET", "/api/devices/n/1/usage?hours=0.001").json() == []
    assert there.ask("dee", "GET", "/api/devices/n/7/usage").json() == []


def test_the_devices_that_a_job_had_last(there: AppServer) -> None:
    number = training(there)
    assert there.ask("dee", "GET", f"/api/jobs/{number}").json()["last_allocation"] == []
    with there.context.sessions.begin() as session:
        transition(session, session.get_one(JobRow, number), JobState.FAILED, TESTED, 2.0)
    found = there.ask("dee", "GET", f"/api/jobs/{number}").json()
    assert (found["allocation"], found["last_allocation"], found["has_plan"]) == ([], ["n/0", "n/1"], False)
    (listed,) = there.ask("dee", "GET", "/api/jobs").json()["jobs"]
    assert listed["last_allocation"] == []


@pytest.mark.wording
def test_a_plan_and_why_it_changed(there: AppServer) -> None:
    number = training(there)
    assert there.ask("dee", "GET", f"/api/jobs/{number}/plan").status_code == 404
    body = {"protocol": PROTOCOL, "generation": 1, "content": plan(why="rank 1 takes 1.9 times as long")}
    assert there.ask(f"worker-{number}", "PUT", f"/api/jobs/{number}/plan", json=body).status_code == 204
    assert there.ask("dee", "GET", f"/api/jobs/{number}/plan").json()["content"]["version"] == 1
    assert there.ask("dee", "GET", f"/api/jobs/{number}").json()["has_plan"]
    assert reasons(there, number)[-1] == "plan changed: rank 1 takes 1.9 times as long"
    for version in (2, 3):
        again = {**body, "content": plan(version=version, why="rank 0 takes 1.1 times as long")}
        assert there.ask(f"worker-{number}", "PUT", f"/api/jobs/{number}/plan", json=again).status_code == 204
    assert reasons(there, number)[-1] == "plan changed: rank 1 takes 1.9 times as long"
    with there.context.sessions() as session:
        assert session.get_one(JobRow, number).state == JobState.STARTING


def test_what_was_saved(there: AppServer) -> None:
    number = training(there)
    assert there.ask("dee", "GET", f"/api/jobs/{number}/checkpoints").json() == []
    one = {"path": "/data/job-1/step-00000120", "step": 120, "saved_at": "2026-11-01T12:00:00Z", "bytes": 4096}
    body = {"protocol": PROTOCOL, "generation": 1, "checkpoints": [one]}
    assert there.ask(f"worker-{number}", "PUT", f"/api/jobs/{number}/checkpoints", json=body).status_code == 204
    assert there.ask("dee", "GET", f"/api/jobs/{number}/checkpoints").json() == [one]


def test_devices_and_links_as_they_are_used(there: AppServer, clock: Clock) -> None:
    there.controller.refresh_nodes()
    (node,) = there.ask("dee", "GET", "/api/nodes").json()
    number = submitted(there)
    worker(there, number, tuple(each["name"] for each in node["devices"][:2]))
    traffic = {"nic": "eth0", "received_bytes_per_s": 2e6, "sent_bytes_per_s": 1e6, "capacity_bytes_per_s": 1.25e9}
    reported(there, number, 0, use={"busy": 0.75}, moved_bytes=1_000_000, traffic=traffic)
    reported(there, number, 1, use={"busy": 0.5}, moved_bytes=1_000_000)
    (node,) = there.ask("dee", "GET", "/api/nodes").json()
    assert node["traffic"] == traffic
    assert [each["use"] and each["use"]["busy"] for each in node["devices"]] == [0.75, 0.5, None, None]
    assert [each["moved_bytes_per_s"] for each in node["devices"]] == [4e6, 4e6, None, None]
    clock.ahead_s += 60  # nobody has said anything of late
    (node,) = there.ask("dee", "GET", "/api/nodes").json()
    assert node["traffic"] is None
    assert node["devices"][0]["use"] is None


def test_places_in_the_queue(there: AppServer) -> None:
    there.controller.refresh_nodes()
    numbers = [submitted(there, devices="3", priority=priority) for priority in (50, 10, 90)]
    assert [there.ask("dee", "GET", f"/api/jobs/{number}").json()["queue_position"] for number in numbers] == [None] * 3
    there.controller.schedule()
    listed = there.ask("dee", "GET", "/api/jobs").json()["jobs"]
    assert {job["id"]: job["queue_position"] for job in listed} == dict(zip(numbers, (1, 2, None), strict=True))


def test_who_am_i(there: AppServer) -> None:
    assert there.ask("dee", "GET", "/api/me").json() == {"user": "dee", "role": "viewer"}


def test_figures_for_prometheus(there: AppServer) -> None:
    number = training(there)
    there.controller.refresh_nodes()
    reported(there, number, 0, use={"busy": 0.5})
    answer = there.ask("dee", "GET", "/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in answer.text.splitlines() if line[0] != "#"
    }
    assert found['mimatrix_jobs{state="starting"}'] == 1
    assert found[f'mimatrix_job_step_seconds{{job="{number}"}}'] == 0.25
    assert found[f'mimatrix_rank_compute_seconds{{device="n/0",job="{number}",rank="0"}}'] == 0.1
    assert found[f'mimatrix_device_busy_ratio{{device="n/0",job="{number}",rank="0"}}'] == 0.5
    assert sum(value for name, value in found.items() if name.startswith("mimatrix_devices{")) == 4
    assert not [name for name in found if "power" in name]
