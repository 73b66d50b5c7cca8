"""Who did not come to a native call: a rank that is silent or has not begun it, and no rank that only waits itself."""

from collections.abc import Mapping

from mimatrix.comm.control.unfinished_calls import RankState, UnfinishedCall, UnfinishedCalls, WaitingRank
from mimatrix.comm.control.user_calls import UserCall
from mimatrix.comm.control.wait_graph import Culprit, Query

EVALUATE = UserCall("run.evaluate", "e", place="train.py, line 41")


def unfinished(group: str = "all", number: int = 7, members: tuple[int, ...] = (0, 1, 2)) -> UnfinishedCall:
    return UnfinishedCall(group=group, number=number, members=members, waited_s=30.0, until_s=1.0)


def state(number: int, waits_for: int | None = None, group: str = "all", call: UserCall | None = None) -> RankState:
    return RankState(begun={f"{group}/calls": number}, waits_for=waits_for, call=call)


def decide(states: Mapping[int, RankState], now_s: float = 2.0) -> list[Culprit | WaitingRank]:
    calls = UnfinishedCalls()
    assert calls.complain(unfinished()) == Query((0, 1, 2))
    for rank, answer in states.items():
        calls.answer(rank, answer)
    return calls.decide(now_s)


def test_rank_with_a_lower_number_did_not_come() -> None:
    assert decide({0: state(7), 1: state(6), 2: state(8)}) == [Culprit(1, "it did not come for 30.0 s")]


def test_rank_that_has_begun_no_call_of_the_group_did_not_come() -> None:
    late = RankState(begun={"all": 9}, call=EVALUATE)
    assert decide({0: state(7), 1: state(7), 2: late}) == [
        Culprit(2, "it did not come for 30.0 s; it is in run.evaluate (train.py, line 41)")
    ]


def test_silent_rank_is_to_blame_rather_than_a_late_one() -> None:
    assert decide({0: state(7), 1: state(6)}) == [Culprit(2, "it did not come for 30.0 s and does not answer")]


def test_silent_rank_has_time_to_answer() -> None:
    assert decide({0: state(7), 1: state(7)}, now_s=0.5) == []


def test_all_that_came_are_not_accused() -> None:
    assert decide({0: state(7), 1: state(9), 2: state(7)}, now_s=0.1) == []


def test_late_rank_that_waits_is_not_accused_before_one_that_does_not() -> None:
    assert decide({0: state(7), 1: state(6, waits_for=2), 2: state(6)}) == [Culprit(2, "it did not come for 30.0 s")]


def test_late_rank_that_waits_for_a_rank_of_another_group_leads_to_it() -> None:
    states = {0: state(7), 1: state(6, waits_for=2), 2: state(6, waits_for=5)}
    assert decide(states) == [WaitingRank(2, 5, 30.0)]


def test_complaints_are_decided_one_by_one() -> None:
    calls = UnfinishedCalls()
    assert calls.complain(unfinished()) == Query((0, 1, 2))
    assert calls.complain(unfinished()) is None, "it is being found out"
    assert calls.complain(unfinished("pair", 3, (0, 3))) == Query((0, 3))
    calls.answer(0, RankState(begun={"all/calls": 7, "pair/calls": 3}))
    calls.answer(3, state(2, group="pair"))
    assert calls.decide(0.1) == [Culprit(3, "it did not come for 30.0 s")]
    calls.answer(1, state(7))
    calls.answer(2, state(7))
    assert calls.decide(0.2) == []
    assert calls.calls == {}


def test_complaints_are_bounded() -> None:
    calls = UnfinishedCalls()
    asked = [calls.complain(unfinished(number=number)) for number in range(1, 1000)]
    assert len(calls.calls) == len([query for query in asked if query]) == 64


def test_members_that_ended_are_late_only_if_they_ended_before_the_call() -> None:
    call = unfinished()
    assert call.find_ended({1: {"all/calls": 7}, 2: {"all/calls": 6}, 4: {}}) == [2]
    assert call.find_ended({1: {"all/calls": 7}}) == []
