"""What a keeper concludes from what it hears; no process runs here."""

import signal
from dataclasses import replace

from mimatrix.launch.exit_causes import EndedFor, ExitCause, ExitKind
from mimatrix.launch.launcher import MemberState, Phase
from mimatrix.launch.local.reaper import Kind, Report
from mimatrix.launch.local.team_state import Ending, Ledger

RUNNING = MemberState(Phase.RUNNING)


def exited(returncode: int, because_of: int | None = None, restarts: int = 0) -> MemberState:
    cause = ExitCause.from_returncode(returncode)
    if because_of is not None:
        cause = replace(cause, ended_for=EndedFor.PEER, because_of=because_of)
    return MemberState(Phase.EXITED, cause, restarts)


def running(ranks: int) -> Ledger:
    ledger = Ledger(ranks)
    ledger.take([(rank, Report(Kind.STARTED, 0.0)) for rank in range(ranks)])
    return ledger


def ended(at_s: float, code: int) -> Report:
    return Report(Kind.ENDED, at_s, code)


def test_a_team_has_started_when_all_have() -> None:
    ledger = Ledger(2)
    ledger.take([(1, Report(Kind.STARTED, 0.0))])
    assert not ledger.has_started
    assert ledger.team.members == (MemberState(Phase.STARTING), RUNNING)
    ledger.take([(0, Report(Kind.STARTED, 1.0))])
    assert ledger.has_started


def test_a_member_has_exited_when_its_tree_has() -> None:
    ledger = running(1)
    ledger.take([(0, ended(1.0, 0))])
    assert ledger.team.members == (RUNNING,)
    ledger.leave(0, 2.0)
    assert ledger.team.members == (exited(0),)
    assert ledger.ending_of(0) == Ending.NOT


def test_the_first_in_time_is_to_blame_not_the_first_in_line() -> None:
    ledger = running(3)
    ledger.take([(0, ended(5.0, 1)), (2, ended(4.0, 7))])
    assert ledger.team.first_failure == 2
    ledger.take([(1, ended(3.0, -9))])
    assert ledger.team.first_failure == 1
    for rank in range(3):
        ledger.leave(rank, 6.0)
    assert ledger.team.members == (exited(1, because_of=1), exited(-9), exited(7, because_of=1))


def test_who_was_told_to_end_has_not_failed() -> None:
    ledger = running(1)
    ledger.tell(Ending.WITH_GRACE)
    ledger.take([(0, ended(1.0, -signal.SIGTERM))])
    ledger.leave(0, 1.0)
    assert ledger.team.first_failure is None
    asked = ExitCause(kind=ExitKind.SIGNALED, signal=signal.SIGTERM, ended_for=EndedFor.REQUEST)
    assert ledger.team.members[0].cause == asked


def test_an_ending_only_grows() -> None:
    ledger = running(1)
    for told, holds in [(Ending.WITH_GRACE, 1), (Ending.NOW, 2), (Ending.WITH_GRACE, 2)]:
        ledger.tell(told)
        assert ledger.ending_of(0) == holds


def test_one_that_cannot_be_started_ends_all_at_once() -> None:
    ledger = Ledger(2)
    ledger.take([(0, Report(Kind.STARTED, 0.0)), (1, Report(Kind.REFUSED, 1.0, text="no such file"))])
    assert ledger.refusal == "rank 1 cannot be started: no such file"
    assert ledger.ending_of(0) == Ending.NOW
    assert not ledger.has_started
    ledger.leave(1, 2.0)
    assert ledger.team.members == (RUNNING, MemberState(Phase.EXITED, ExitCause.refused("no such file")))


def test_a_guard_that_is_killed_is_a_failure() -> None:
    ledger = running(2)
    ledger.leave(1, 1.0)
    assert ledger.team.first_failure == 1
    assert ledger.ending_of(0) == Ending.WITH_GRACE
    assert ledger.team.members[1].phase == Phase.LOST


def test_what_cannot_be_killed_is_told() -> None:
    ledger = running(1)
    ledger.take([(0, ended(1.0, 0)), (0, Report(Kind.LEFT, 2.0, text="12 is left"))])
    ledger.leave(0, 3.0)
    assert ledger.team.members == (MemberState(Phase.EXITED, ExitCause.from_returncode(0, detail="12 is left")),)


def test_a_group_ends_by_itself() -> None:
    ledger = Ledger(3, ((0, 1), (2,)))
    ledger.take([(rank, Report(Kind.STARTED, 0.0)) for rank in range(3)])
    ledger.take([(1, ended(1.0, -signal.SIGKILL))])
    assert [ledger.ending_of(rank) for rank in range(3)] == [Ending.WITH_GRACE, Ending.WITH_GRACE, Ending.NOT]
    ledger.take([(0, ended(2.0, -signal.SIGTERM))])
    for rank in (0, 1):
        ledger.leave(rank, 3.0)
    assert ledger.team.members == (exited(-signal.SIGTERM, because_of=1), exited(-signal.SIGKILL), RUNNING)
    assert ledger.team.first_failure == 1
    assert not ledger.team.has_ended
    ledger.tell(Ending.WITH_GRACE)
    assert ledger.ending_of(2) == Ending.WITH_GRACE


def test_one_that_cannot_be_started_ends_all_groups() -> None:
    ledger = Ledger(2, ((0,), (1,)))
    ledger.take([(0, Report(Kind.STARTED, 0.0)), (1, Report(Kind.REFUSED, 1.0, text="no such file"))])
    assert [ledger.ending_of(rank) for rank in range(2)] == [Ending.NOW, Ending.NOW]


def in_groups(restarts: int) -> Ledger:
    ledger = Ledger(3, ((0, 1), (2,)), restarts)
    ledger.take([(rank, Report(Kind.STARTED, 0.0)) for rank in range(3)])
    return ledger


def lose(ledger: Ledger, *codes: tuple[int, int]) -> None:
    ledger.take([(rank, ended(1.0 + number, code)) for number, (rank, code) in enumerate(codes)])
    for rank, _ in codes:
        ledger.leave(rank, 9.0)


def test_a_lost_group_restarts_as_often_as_it_may() -> None:
    ledger = in_groups(restarts=2)
    ledger.take([(1, ended(1.0, -signal.SIGKILL))])
    ledger.leave(1, 2.0)
    assert ledger.lost() == ()  # rank 0 is not gone yet
    lose(ledger, (0, -signal.SIGTERM))
    assert ledger.lost() == (0,)
    assert ledger.restart_group(0) == [0, 1]
    assert ledger.team.first_failure is None
    before = MemberState(Phase.STARTING, ExitCause.from_returncode(-signal.SIGKILL), 1)
    assert ledger.team.members[1:] == (before, RUNNING)
    assert [ledger.ending_of(rank) for rank in range(3)] == [Ending.NOT] * 3
    assert ledger.lost() == ()
    ledger.take([(rank, Report(Kind.STARTED, 10.0)) for rank in (0, 1)])
    assert ledger.team.members[1].phase == Phase.RUNNING
    lose(ledger, (2, 1))
    assert ledger.lost() == (1,)  # any group
    assert ledger.restart_group(1) == [2]
    ledger.take([(2, Report(Kind.STARTED, 11.0))])
    lose(ledger, (0, 1), (1, -signal.SIGTERM))
    assert ledger.lost() == ()
    assert ledger.team.members[0] == exited(1, restarts=1)


def test_who_does_not_return() -> None:
    told = in_groups(restarts=9)
    lose(told, (2, 1))
    told.tell(Ending.WITH_GRACE)
    assert told.lost() == ()
    for code in (0, 2, 75):
        ledger = in_groups(restarts=9)
        lose(ledger, (2, code))
        assert ledger.lost() == ()
    saved = in_groups(restarts=9)
    lose(saved, (2, 1))
    saved.take([(0, ended(3.0, 75))])  # as all others will
    assert saved.lost() == ()
    abandoned = in_groups(restarts=9)
    lose(abandoned, (2, 1))
    abandoned.abandon(1)
    assert abandoned.lost() == ()
    stuck = in_groups(restarts=9)
    stuck.take([(2, ended(1.0, 1)), (2, Report(Kind.LEFT, 2.0, text="12 is left"))])
    stuck.leave(2, 3.0)
    assert stuck.lost() == ()
    whole = Ledger(2, restarts=9, others=True)
    lose(whole, (0, 1), (1, 1))
    assert whole.lost() == ()


def test_there_must_be_somebody_to_return_to() -> None:
    alone = in_groups(restarts=9)
    lose(alone, (2, 1), (0, 1), (1, 1))
    assert alone.lost() == ()
    done = in_groups(restarts=9)
    lose(done, (2, 1))
    done.take([(0, ended(3.0, 0)), (1, ended(3.0, 0))])  # their guards are there for a moment
    assert done.lost() == ()
    elsewhere = Ledger(1, ((0,),), restarts=9, others=True)
    lose(elsewhere, (0, 1))
    assert elsewhere.lost() == (0,)


def test_one_that_cannot_be_started_again_ends_no_other() -> None:
    ledger = in_groups(restarts=1)
    lose(ledger, (2, 1))
    assert ledger.restart_group(1) == [2]
    ledger.take([(2, Report(Kind.REFUSED, 9.0, text="no such file"))])
    ledger.leave(2, 9.0)
    assert ledger.refusal == ""
    assert ledger.ending_of(0) == Ending.NOT
    assert ledger.team.members[2] == MemberState(Phase.EXITED, ExitCause.refused("no such file"), 1)
