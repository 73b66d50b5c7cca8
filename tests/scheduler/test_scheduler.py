"""The scheduler: what holds for any state, and what its reasons say."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimatrix.scheduler import (
    Decision,
    DeviceSlot,
    Preempt,
    Queued,
    ResourceRequest,
    Running,
    SchedulingPolicy,
    Start,
    StartKind,
    State,
    Stop,
    StopKind,
    Wait,
    WaitKind,
    decide,
    reservation,
)
from mimatrix.scheduler.reasons import to_json

KINDS = ("a100", "v100", "RTX 3090")
SPEEDS = {"a100": 4.0, "v100": 2.0, "RTX 3090": 1.5}
WISHES = ("1", "2", "3", "a100:1", "v100:2", "a100:1,v100:1", "3090:1,2", "2..4", "a100:1..3", "all", "a100:1,1..2")


def device(node: str, number: int, kind: str = "a100", rack: str = "") -> DeviceSlot:
    return DeviceSlot(node, number, kind, SPEEDS[kind], rack)


@st.composite
def states(draw: st.DrawFn) -> State:
    devices = [
        device(f"n{node}", number, draw(st.sampled_from(KINDS)), f"r{node % 2}")
        for node in range(draw(st.integers(1, 4)))
        for number in range(draw(st.integers(1, 4)))
    ]
    chance = random.Random(draw(st.integers(0, 1 << 30)))
    left = chance.sample(devices, len(devices))
    running = []
    for number in range(chance.randint(0, 4)):
        mine = [left.pop() for _ in range(min(len(left), chance.randint(1, 3)))]
        if mine:
            running.append(
                Running(
                    100 + number,
                    tuple(sorted(mine)),
                    chance.choice("uvw"),
                    chance.choice((10, 50, 90)),
                    started_s=chance.choice((0.0, 400.0)),
                    max_time_s=chance.choice((None, 500.0, 1500.0, 3000.0)),
                    preemptible=chance.random() < 0.6,
                    is_leaving=chance.random() < 0.2,
                )
            )
    queued = tuple(
        Queued(
            200 + number,
            ResourceRequest.parse(chance.choice(WISHES)),
            chance.choice("uvw"),
            chance.choice((10, 50, 90)),
            since_s=chance.choice((0.0, 100.0, 900.0)),
            max_time_s=chance.choice((None, 60.0, 1000.0)),
        )
        for number in range(chance.randint(0, 8))
    )
    used = {user: chance.random() * 1000 for user in "uvw" if chance.random() < 0.7}
    return State(tuple(devices), queued, tuple(running), used)


def starts(decisions: tuple[Decision, ...]) -> list[Start]:
    return [each for each in decisions if isinstance(each, Start)]


@settings(deadline=None, max_examples=300)
@given(states())
def test_what_holds_for_any_state(state: State) -> None:
    found = decide(state, 1000.0)
    # Every queued job hears what becomes of it, once.
    assert sorted(each.job for each in found if isinstance(each, Start | Wait)) == sorted(
        job.job for job in state.queued
    )
    assert all(each.reason.describe() for each in found)
    given = [each for start in starts(found) for each in start.devices]
    busy = [each for running in state.running for each in running.devices]
    assert not [name for name, count in Counter(given + busy).items() if count > 1], "two jobs on a device"
    assert set(given) <= set(state.devices)
    jobs = {job.job: job for job in state.queued}
    for start in starts(found):
        _check_request(jobs[start.job].request.within(len(state.devices)), start.devices)


def _check_request(request: ResourceRequest, devices: tuple[DeviceSlot, ...]) -> None:
    counts = Counter(each.kind for each in devices)
    for part in request.parts:
        if part.kind:
            (kind,) = (kind for kind in KINDS if part.kind in kind)
            assert counts[kind] >= part.least
    assert request.least <= len(devices) <= sum(part.most for part in request.parts)


@settings(deadline=None, max_examples=300)
@given(states())
def test_preemption_goes_upwards_and_to_those_who_allow_it(state: State) -> None:
    running = {each.job: each for each in state.running}
    jobs = {job.job: job for job in state.queued}
    found = decide(state, 1000.0)
    told = [each for each in found if isinstance(each, Preempt)]
    assert len({each.job for each in told}) == len(told)
    for each in told:
        victim = running[each.job]
        assert victim.preemptible
        assert not victim.is_leaving
        assert victim.priority < jobs[each.other].priority
    ended = {each.job for each in found if isinstance(each, Stop)}
    for other in state.running:
        limited = other.max_time_s is not None and other.started_s + other.max_time_s <= 1000.0
        assert (other.job in ended) == (limited and not other.is_leaving)


@settings(deadline=None, max_examples=200)
@given(states(), st.integers(0, 1 << 30))
def test_the_same_state_gives_the_same_decisions(state: State, seed: int) -> None:
    chance = random.Random(seed)
    other = replace(
        state,
        devices=tuple(chance.sample(state.devices, len(state.devices))),
        queued=tuple(chance.sample(state.queued, len(state.queued))),
        running=tuple(chance.sample(state.running, len(state.running))),
    )
    assert set(decide(other, 1000.0)) == set(decide(state, 1000.0)) == set(decide(state, 1000.0))


@settings(deadline=None, max_examples=400)
@given(states())
def test_backfill_never_delays_the_head(state: State) -> None:
    """What is promised to the first job that cannot start is promised to it still, with those that overtake it."""
    policy = SchedulingPolicy(preempts=False)
    plain, filled = (decide(state, 1000.0, replace(policy, backfill=each)) for each in (False, True))
    before, after = (_applied(state, starts(each)) for each in (plain, filled))
    assert {start.job for start in starts(plain)} <= {start.job for start in starts(filled)}
    waiting = {each.job for each in plain if isinstance(each, Wait) and each.reason.kind is WaitKind.FIRST_IN_LINE}
    for job in state.queued:
        if job.job in waiting:
            first, then = (reservation(job, each, 1000.0, policy) for each in (before, after))
            assert first
            assert then
            assert then.at_s <= first.at_s


def _applied(state: State, started: list[Start]) -> State:
    jobs = {job.job: job for job in state.queued}
    more = tuple(
        Running(each.job, each.devices, started_s=1000.0, max_time_s=jobs[each.job].max_time_s) for each in started
    )
    return replace(state, running=state.running + more)


A, B = (tuple(device(node, number) for number in range(4)) for node in "ab")
SLOW = tuple(device("c", number, "v100") for number in range(4))


def job(number: int, request: str, **more: object) -> Queued:
    return Queued(number, ResourceRequest.parse(request), **more)  # type: ignore[arg-type]


def only(state: State, now_s: float = 0.0, policy: SchedulingPolicy = SchedulingPolicy()) -> Decision:
    (found,) = decide(state, now_s, policy)
    return found


def test_the_fastest_that_are_together() -> None:
    found = only(State((*SLOW, *A), (job(1, "3"),)))
    assert isinstance(found, Start)
    assert found.devices == A[:3]
    assert found.reason.describe() == "3 x a100 on a: the best that is free"


def test_a_node_that_is_left_with_less_is_preferred() -> None:
    busy = Running(10, B[:2])
    found = only(State((*A, *B), (job(1, "2"),), (busy,)))
    assert isinstance(found, Start)
    assert found.devices == B[2:]


def test_near_nodes_before_far_ones() -> None:
    devices = [DeviceSlot(f"n{number}", 0, "gpu", 1.0, f"rack-{number % 2}") for number in range(6)]
    found = only(State(tuple(devices), (job(1, "3"),)))
    assert isinstance(found, Start)
    assert len({each.rack for each in found.devices}) == 1


def test_measured_speeds_count_more_than_kinds() -> None:
    asked = job(1, "2", speeds={"a100": 10.0, "v100": 30.0})
    found = only(State((*A, *SLOW), (asked,)))
    assert isinstance(found, Start)
    assert found.devices == SLOW[:2]


def test_elastic_jobs_start_with_what_there_is() -> None:
    found = only(State(A, (job(1, "2..8"),), (Running(10, A[:1]),)))
    assert isinstance(found, Start)
    assert found.devices == A[1:]


def test_why_it_waits() -> None:
    running = Running(10, A, max_time_s=600.0)
    first, second = decide(State(A, (job(1, "2"), job(2, "1", since_s=5.0)), (running,)), 60.0)
    assert isinstance(first, Wait)
    assert first.reason.describe() == "needs 2 x a100, none free; first in line when job 10 ends, at the latest in 540s"
    assert isinstance(second, Wait)
    assert second.reason.describe() == "needs 1 x a100, none free; job 1 comes first"
    never = only(State(A, (job(3, "h100:2"),)))
    assert isinstance(never, Wait)
    assert never.reason.describe().startswith(
        "needs 2 devices of a kind that is not there, and the cluster has 4 x a100"
    )


def test_overtaking_says_why_it_may() -> None:
    running = Running(10, A[:3], max_time_s=600.0)
    short = job(4, "1", since_s=5.0, max_time_s=300.0)
    _, found = decide(State(A, (job(1, "4"), short), (running,)), 60.0)
    assert isinstance(found, Start)
    assert found.reason.describe().endswith("; it ends before job 1 can have them")
    long = job(5, "1", since_s=5.0, max_time_s=900.0)
    _, found = decide(State(A, (job(1, "4"), long), (running,)), 60.0)
    assert isinstance(found, Wait)
    assert found.reason.describe() == "needs 1 x a100, 1 x a100 free, 1 of them kept for job 1"


def test_the_least_important_goes() -> None:
    low, middle = (
        Running(11, A[:2], priority=10, preemptible=True),
        Running(12, A[2:], priority=20, preemptible=True),
    )
    told, waits = decide(State(A, (job(1, "2", priority=90),), (low, middle)), 0.0)
    assert isinstance(told, Preempt)
    assert (told.job, told.other, told.reason.kind) == (11, 1, StopKind.PREEMPT)
    assert told.reason.describe() == "job 1 has priority 90 and it has 10"
    assert isinstance(waits, Wait)
    assert waits.reason.describe() == "needs 2 x a100; waits for job 11 to save and stop"
    leaving = replace(low, is_leaving=True)
    assert decide(State(A, (job(1, "2", priority=90),), (leaving, middle)), 0.0) == (waits,)
    ended = replace(leaving, saves=False)
    (waits,) = decide(State(A, (job(1, "2", priority=90),), (ended, middle)), 0.0)
    assert waits.reason.describe() == "needs 2 x a100; waits for job 11 to end"
    _, waits = decide(State(A, (job(1, "4", priority=90),), (ended, middle)), 0.0)
    assert waits.reason.describe() == "needs 4 x a100; waits for job 12 to save and stop, and for job 11 to end"


def test_nobody_goes_in_vain() -> None:
    low = Running(11, A[:1], priority=10, preemptible=True)
    fixed = Running(13, A[1:], priority=10)
    assert isinstance(only(State(A, (job(1, "2", priority=90),), (low, fixed))), Wait)


def test_users_who_had_much_come_later() -> None:
    state = State(A, (job(1, "4", user="much"), job(2, "4", user="little", since_s=1.0)), (), {"much": 1e6})
    found = {each.job: type(each) for each in decide(state, 10.0)}
    assert found == {2: Start, 1: Wait}


@pytest.mark.parametrize("text", ["", "0", "x", "a100:", "3..2", "a:0", "1,,2", "99999999999999", "-1", "1.5"])
def test_wishes_that_are_none(text: str) -> None:
    with pytest.raises(Exception, match="names no devices; write a number"):
        ResourceRequest.parse(text)


@pytest.mark.parametrize("text", ["1", "a100:2,v100:4", "2..8", "all", "RTX 3090:1..2,3"])
def test_wishes_are_written_as_they_were_read(text: str) -> None:
    assert str(ResourceRequest.parse(text)) == text


def test_why_it_starts_is_a_value() -> None:
    running = Running(10, A[:3], max_time_s=600.0)
    short = job(4, "1", since_s=5.0, max_time_s=300.0)
    first, found = decide(State(A, (job(1, "4"), short), (running,)), 60.0)
    assert isinstance(first, Wait)
    assert (first.reason.kind, first.reason.blocked_by, first.reason.at_latest_s) == (
        WaitKind.FIRST_IN_LINE,
        (10,),
        540.0,
    )
    assert isinstance(found, Start)
    assert (found.reason.kind, found.reason.ahead) == (StartKind.ENDS_BEFORE, 1)
    assert to_json(found.reason) == {"kind": "ends_before", "devices": [["a100", 1]], "nodes": ["a"], "ahead": 1}
