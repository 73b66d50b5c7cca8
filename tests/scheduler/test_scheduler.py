"""The scheduler: what holds for any state, and what its reasons say."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimatrix.scheduler import (
    Decision,
    End,
    Policy,
    Preempt,
    Queued,
    Running,
    Seat,
    Start,
    State,
    Wait,
    Wish,
    decide,
    reservation,
)

KINDS = ("a100", "v100", "RTX 3090")
SPEEDS = {"a100": 4.0, "v100": 2.0, "RTX 3090": 1.5}
WISHES = ("1", "2", "3", "a100:1", "v100:2", "a100:1,v100:1", "3090:1,2", "2..4", "a100:1..3", "all", "a100:1,1..2")


def seat(node: str, number: int, kind: str = "a100", near: str = "") -> Seat:
    return Seat(node, number, kind, SPEEDS[kind], near)


@st.composite
def states(draw: st.DrawFn) -> State:
    seats = [
        seat(f"n{node}", number, draw(st.sampled_from(KINDS)), f"r{node % 2}")
        for node in range(draw(st.integers(1, 4)))
        for number in range(draw(st.integers(1, 4)))
    ]
    chance = random.Random(draw(st.integers(0, 1 << 30)))
    left = chance.sample(seats, len(seats))
    running = []
    for number in range(chance.randint(0, 4)):
        mine = [left.pop() for _ in range(min(len(left), chance.randint(1, 3)))]
        if mine:
            running.append(
                Running(
                    f"run-{number}",
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
            f"job-{number}",
            Wish.parse(chance.choice(WISHES)),
            chance.choice("uvw"),
            chance.choice((10, 50, 90)),
            since_s=chance.choice((0.0, 100.0, 900.0)),
            max_time_s=chance.choice((None, 60.0, 1000.0)),
        )
        for number in range(chance.randint(0, 8))
    )
    used = {user: chance.random() * 1000 for user in "uvw" if chance.random() < 0.7}
    return State(tuple(seats), queued, tuple(running), used)


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
    assert all(each.reason for each in found)
    given = [each for start in starts(found) for each in start.seats]
    busy = [each for running in state.running for each in running.seats]
    assert not [name for name, count in Counter(given + busy).items() if count > 1], "two jobs on a device"
    assert set(given) <= set(state.seats)
    jobs = {job.job: job for job in state.queued}
    for start in starts(found):
        _check_wish(jobs[start.job].wish.within(len(state.seats)), start.seats)


def _check_wish(wish: Wish, seats: tuple[Seat, ...]) -> None:
    counts = Counter(each.kind for each in seats)
    for part in wish.parts:
        if part.kind:
            (kind,) = (kind for kind in KINDS if part.kind in kind)
            assert counts[kind] >= part.least
    assert wish.least <= len(seats) <= sum(part.most for part in wish.parts)


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
    ended = {each.job for each in found if isinstance(each, End)}
    for other in state.running:
        limited = other.max_time_s is not None and other.started_s + other.max_time_s <= 1000.0
        assert (other.job in ended) == (limited and not other.is_leaving)


@settings(deadline=None, max_examples=200)
@given(states(), st.integers(0, 1 << 30))
def test_the_same_state_gives_the_same_decisions(state: State, seed: int) -> None:
    chance = random.Random(seed)
    other = replace(
        state,
        seats=tuple(chance.sample(state.seats, len(state.seats))),
        queued=tuple(chance.sample(state.queued, len(state.queued))),
        running=tuple(chance.sample(state.running, len(state.running))),
    )
    assert set(decide(other, 1000.0)) == set(decide(state, 1000.0)) == set(decide(state, 1000.0))


@settings(deadline=None, max_examples=400)
@given(states())
def test_backfill_never_delays_the_head(state: State) -> None:
    """What is promised to the first job that cannot start is promised to it still, with those that overtake it."""
    policy = Policy(preempts=False)
    plain, filled = (decide(state, 1000.0, replace(policy, backfill=each)) for each in (False, True))
    before, after = (_applied(state, starts(each)) for each in (plain, filled))
    assert {start.job for start in starts(plain)} <= {start.job for start in starts(filled)}
    waiting = {each.job for each in plain if isinstance(each, Wait) and "first in line" in each.reason}
    for job in state.queued:
        if job.job in waiting:
            first, then = (reservation(job, each, 1000.0, policy) for each in (before, after))
            assert first
            assert then
            assert then.at_s <= first.at_s


def _applied(state: State, started: list[Start]) -> State:
    jobs = {job.job: job for job in state.queued}
    more = tuple(
        Running(each.job, each.seats, started_s=1000.0, max_time_s=jobs[each.job].max_time_s) for each in started
    )
    return replace(state, running=state.running + more)


A, B = (tuple(seat(node, number) for number in range(4)) for node in "ab")
SLOW = tuple(seat("c", number, "v100") for number in range(4))


def job(name: str, wish: str, **more: object) -> Queued:
    return Queued(name, Wish.parse(wish), **more)  # type: ignore[arg-type]


def only(state: State, now_s: float = 0.0, policy: Policy = Policy()) -> Decision:
    (found,) = decide(state, now_s, policy)
    return found


def test_the_fastest_that_are_together() -> None:
    found = only(State((*SLOW, *A), (job("x", "3"),)))
    assert isinstance(found, Start)
    assert found.seats == A[:3]
    assert found.reason == "3 x a100 on a: the best that is free"


def test_a_node_that_is_left_with_less_is_preferred() -> None:
    busy = Running("r", B[:2])
    found = only(State((*A, *B), (job("x", "2"),), (busy,)))
    assert isinstance(found, Start)
    assert found.seats == B[2:]


def test_near_nodes_before_far_ones() -> None:
    seats = [Seat(f"n{number}", 0, "gpu", 1.0, f"rack-{number % 2}") for number in range(6)]
    found = only(State(tuple(seats), (job("x", "3"),)))
    assert isinstance(found, Start)
    assert len({each.near for each in found.seats}) == 1


def test_measured_speeds_count_more_than_kinds() -> None:
    asked = job("x", "2", speeds={"a100": 10.0, "v100": 30.0})
    found = only(State((*A, *SLOW), (asked,)))
    assert isinstance(found, Start)
    assert found.seats == SLOW[:2]


def test_elastic_jobs_start_with_what_there_is() -> None:
    found = only(State(A, (job("x", "2..8"),), (Running("r", A[:1]),)))
    assert isinstance(found, Start)
    assert found.seats == A[1:]


def test_why_it_waits() -> None:
    running = Running("r", A, max_time_s=600.0)
    first, second = decide(State(A, (job("x", "2"), job("y", "1", since_s=5.0)), (running,)), 60.0)
    assert isinstance(first, Wait)
    assert first.reason == "needs 2 x a100, none free; first in line when r ends, at the latest in 540s"
    assert isinstance(second, Wait)
    assert second.reason == "needs 1 x a100, none free; x comes first"
    never = only(State(A, (job("z", "h100:2"),)))
    assert isinstance(never, Wait)
    assert never.reason.startswith("needs 2 devices of a kind that is not there, and the cluster has 4 x a100")


def test_overtaking_says_why_it_may() -> None:
    running = Running("r", A[:3], max_time_s=600.0)
    short = job("short", "1", since_s=5.0, max_time_s=300.0)
    _, found = decide(State(A, (job("x", "4"), short), (running,)), 60.0)
    assert isinstance(found, Start)
    assert found.reason.endswith("; it ends before x can have them")
    long = job("long", "1", since_s=5.0, max_time_s=900.0)
    _, found = decide(State(A, (job("x", "4"), long), (running,)), 60.0)
    assert isinstance(found, Wait)
    assert found.reason == "needs 1 x a100, 1 x a100 free, 1 of them kept for x"


def test_the_least_important_goes() -> None:
    low, middle = (
        Running("low", A[:2], priority=10, preemptible=True),
        Running("middle", A[2:], priority=20, preemptible=True),
    )
    told, waits = decide(State(A, (job("x", "2", priority=90),), (low, middle)), 0.0)
    assert told == Preempt("low", "x", "x has priority 90 and it has 10")
    assert isinstance(waits, Wait)
    assert waits.reason == "needs 2 x a100; waits for low to save and go"
    leaving = replace(low, is_leaving=True)
    assert decide(State(A, (job("x", "2", priority=90),), (leaving, middle)), 0.0) == (waits,)
    ended = replace(leaving, saves=False)
    (waits,) = decide(State(A, (job("x", "2", priority=90),), (ended, middle)), 0.0)
    assert waits.reason == "needs 2 x a100; waits for low to end"
    _, waits = decide(State(A, (job("x", "4", priority=90),), (ended, middle)), 0.0)
    assert waits.reason == "needs 4 x a100; waits for middle to save and go, and for low to end"


def test_nobody_goes_in_vain() -> None:
    low = Running("low", A[:1], priority=10, preemptible=True)
    fixed = Running("fixed", A[1:], priority=10)
    assert isinstance(only(State(A, (job("x", "2", priority=90),), (low, fixed))), Wait)


def test_users_who_had_much_come_later() -> None:
    state = State(A, (job("x", "4", user="much"), job("y", "4", user="little", since_s=1.0)), (), {"much": 1e6})
    found = {each.job: type(each) for each in decide(state, 10.0)}
    assert found == {"y": Start, "x": Wait}


@pytest.mark.parametrize("text", ["", "0", "x", "a100:", "3..2", "a:0", "1,,2", "99999999999999", "-1", "1.5"])
def test_wishes_that_are_none(text: str) -> None:
    with pytest.raises(Exception, match="names no devices; write a number"):
        Wish.parse(text)


@pytest.mark.parametrize("text", ["1", "a100:2,v100:4", "2..8", "all", "RTX 3090:1..2,3"])
def test_wishes_are_written_as_they_were_read(text: str) -> None:
    assert str(Wish.parse(text)) == text
