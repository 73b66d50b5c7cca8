"""Ranks that wait for each other in different calls are found, and ranks that can still come are not accused."""

from mimatrix.comm.control.deadlock import BlockedRank, Deadlock, DeadlockSearch
from mimatrix.comm.control.user_calls import UserCall, describe_calls
from mimatrix.comm.control.wait_graph import Query

EVALUATE = UserCall("run.evaluate", "e", fix="call run.evaluate on all ranks", place="train.py, line 41")
STEP = UserCall("optimizer.step", "s", place="train.py, line 30")


def blocked(group: str, number: int, needs: int, begun: dict[str, int], call: UserCall = STEP) -> BlockedRank:
    return BlockedRank(group=group, number=number, needs=(needs,), begun=begun, call=call)


IN_GATHER = blocked("gather", 5, 1, {"gather": 5, "reduce": 7}, EVALUATE)
IN_REDUCE = blocked("reduce", 8, 0, {"gather": 4, "reduce": 8})


def test_two_ranks_in_different_groups_are_a_deadlock_once_both_have_said_so_twice() -> None:
    search = DeadlockSearch()
    assert search.report(0, IN_GATHER) is None
    assert search.report(1, IN_REDUCE) == Query((1, 0))
    assert search.answer(0, IN_GATHER) is None
    deadlock = search.answer(1, IN_REDUCE)
    assert deadlock == Deadlock({1: STEP, 0: EVALUATE})
    assert describe_calls(deadlock.calls) == (
        "rank 0 called run.evaluate (train.py, line 41) where rank 1 called optimizer.step (train.py, line 30); "
        "call run.evaluate on all ranks"
    )


def test_rank_that_has_moved_on_since_its_report_is_not_accused() -> None:
    search = DeadlockSearch()
    search.report(0, IN_GATHER)
    search.report(1, IN_REDUCE)
    assert search.answer(1, IN_REDUCE) is None
    assert search.answer(0, blocked("gather", 6, 1, {"gather": 6, "reduce": 7})) is None
    assert search.answer(1, IN_REDUCE) is None


def test_rank_that_waits_for_one_that_has_begun_its_call_is_no_deadlock() -> None:
    search = DeadlockSearch()
    search.report(0, IN_GATHER)
    assert search.report(1, blocked("reduce", 8, 0, {"gather": 5, "reduce": 8})) is None


def test_rank_whose_background_thread_may_still_come_is_not_accused() -> None:
    search = DeadlockSearch()
    saves = BlockedRank(
        group="reduce", number=8, needs=(0,), begun={"reduce": 8}, background=frozenset({"gather"}), call=STEP
    )
    search.report(0, IN_GATHER)
    assert search.report(1, saves) is None


def test_circle_of_three_is_found_and_a_rank_outside_it_is_not_asked() -> None:
    search = DeadlockSearch()
    search.report(3, blocked("a", 1, 0, {"a": 1}))
    search.report(0, blocked("a", 1, 1, {"a": 1}))
    search.report(1, blocked("b", 1, 2, {"b": 1}))
    assert search.report(2, blocked("c", 1, 0, {"c": 1})) == Query((2, 0, 1))
