"""Traces replayed: closed forms, nobody starves, nothing is lost."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimatrix.core.errors import UserError
from mimatrix.core.resources import ResourceRequest
from mimatrix.scheduler.simulation.replay import POLICIES, SAVING_S, ReplayResult, replay
from mimatrix.scheduler.simulation.trace import Arrival, Trace
from mimatrix.scheduler.state import DeviceSlot, Policy

FOUR = tuple(DeviceSlot("a", number, "gpu") for number in range(4))


def arrival(name: str, request: str, at_s: float, work_s: float, **more: object) -> Arrival:
    return Arrival(name, ResourceRequest.parse(request), at_s, work_s, **more)  # type: ignore[arg-type]


def started(found: ReplayResult) -> dict[str, float]:
    return {outcome.job: outcome.started_s for outcome in found.jobs}


def test_one_after_the_other() -> None:
    trace = Trace(FOUR, (arrival("x", "4", 0, 100), arrival("y", "4", 10, 50), arrival("z", "1", 20, 5)))
    found = replay(trace, POLICIES["in order"])
    assert started(found) == {"x": 0, "y": 100, "z": 150}
    assert found.utilisation == pytest.approx((400 + 200 + 5) / (4 * 155))
    assert found.mean_waited_s == pytest.approx((0 + 90 + 130) / 3)


def test_faster_devices_take_less_time() -> None:
    fast = tuple(DeviceSlot("a", number, "gpu", 2.0) for number in range(4))
    (outcome,) = replay(Trace(fast, (arrival("x", "2..4", 0, 100),)), Policy()).jobs
    assert outcome.ended_s == pytest.approx(100 * 2 / (4 * 2.0))


def test_a_short_one_overtakes_and_delays_nobody() -> None:
    jobs = (
        arrival("x", "3", 0, 100, max_time_s=100.0),
        arrival("y", "4", 1, 50, max_time_s=50.0),
        arrival("z", "1", 2, 60, max_time_s=60.0),
    )
    assert started(replay(Trace(FOUR, jobs), POLICIES["in order"]))["z"] == 150
    found = started(replay(Trace(FOUR, jobs), POLICIES["backfill"]))
    assert found == {"x": 0, "y": 100, "z": 2}


def test_a_preempted_job_goes_on_where_it_was() -> None:
    jobs = (arrival("low", "4", 0, 100, priority=10, preemptible=True), arrival("high", "4", 40, 10, priority=90))
    found = {outcome.job: outcome for outcome in replay(Trace(FOUR, jobs), Policy()).jobs}
    assert found["high"].started_s == 40 + SAVING_S
    assert found["low"].preempted == 1
    assert found["low"].ended_s == pytest.approx(40 + SAVING_S + 10 + 60)


def test_time_limits_end_jobs() -> None:
    (outcome,) = replay(Trace(FOUR, (arrival("x", "1", 0, 100, max_time_s=30.0),)), Policy()).jobs
    assert outcome.ended_s == 30
    assert outcome.reached_limit


def test_nobody_starves() -> None:
    """Small important jobs come without end; a large unimportant one starts all the same, once it has aged."""
    stream = [arrival(f"small-{number}", "1", 26.0 * number, 100, priority=90) for number in range(500)]
    big = arrival("big", "all", 5.0, 50, priority=10)
    trace = Trace(FOUR, tuple(sorted([*stream, big], key=lambda each: each.at_s)))
    without = started(replay(trace, Policy(ageing_s=None, preempts=False)))["big"]
    aged = started(replay(trace, Policy(ageing_s=60.0, preempts=False)))["big"]
    assert without > 500 * 26, "else this test shows nothing"
    assert aged < (90 - 10) * 60 + 300


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 1 << 30), st.sampled_from(sorted(POLICIES)))
def test_every_job_is_done_once(seed: int, name: str) -> None:
    chance = random.Random(seed)
    devices = tuple(
        DeviceSlot(f"n{node}", number, kind, speed)
        for node, (kind, speed) in enumerate([("fast", 2.0), ("slow", 1.0)])
        for number in range(3)
    )
    jobs = tuple(
        arrival(
            f"j{number}",
            chance.choice(("1", "2", "fast:2", "slow:1..3", "all", "fast:9")),
            chance.uniform(0, 500),
            chance.uniform(1, 300),
            user=chance.choice("uv"),
            priority=chance.choice((10, 50, 90)),
            preemptible=chance.random() < 0.5,
            max_time_s=chance.choice((None, 100.0, 500.0)),
        )
        for number in range(25)
    )
    found = replay(Trace(devices, tuple(sorted(jobs, key=lambda each: each.at_s))), POLICIES[name])
    never = {each.job for each in jobs if str(each.request) == "fast:9"}
    assert set(found.never) == never
    assert sorted(outcome.job for outcome in found.jobs) == sorted({each.job for each in jobs} - never)
    assert 0 <= found.utilisation <= 1
    assert all(outcome.at_s <= outcome.started_s <= outcome.ended_s for outcome in found.jobs)


@pytest.mark.parametrize(
    ("trace", "sentence"),
    [
        ("[", "t.json is not a trace; write devices and jobs"),
        ({"devices": []}, "is not a trace"),
        ({"devices": [{"kind": "x"}], "jobs": []}, 't.json, device 1 has no "node"; add it'),
        ({"devices": [{"node": "a", "cuont": 2}], "jobs": []}, 'unknown key "cuont"; did you mean "count"?'),
        (
            {"devices": [{"node": "a"}], "jobs": [{"job": "x", "work_s": -1}]},
            '"work_s" must be a number from 0, got -1',
        ),
        (
            {"devices": [{"node": "a"}], "jobs": [{"job": "x", "work_s": 1, "devices": "q"}]},
            "job 1: .* names no devices",
        ),
        ({"devices": [{"node": "a"}, {"node": "a"}], "jobs": []}, "a node is there twice"),
        ({"devices": [{"node": "a"}], "jobs": [{"job": "x", "work_s": 1}] * 2}, "a job is there twice"),
    ],
)
def test_bad_traces_are_refused_with_the_fix(trace: object, sentence: str) -> None:
    text = trace if isinstance(trace, str) else json.dumps(trace)
    with pytest.raises(UserError, match=sentence):
        Trace.from_text(text, "t.json")


def test_a_trace_without_devices() -> None:
    with pytest.raises(UserError, match="has no devices"):
        replay(Trace((), ()), Policy())
