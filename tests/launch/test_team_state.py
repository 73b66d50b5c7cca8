"""What a supervisor concludes from what it hears; no process runs here."""

import signal
from dataclasses import replace

from mimatrix.launch.exit_causes import EndedFor, ExitCause, ExitKind
from mimatrix.launch.launcher import MemberState, Phase
from mimatrix.launch.local.reaper import ReaperEvent, ReaperEventKind
from mimatrix.launch.local.team_state import StopLevel, TeamStateMachine
from mimatrix.launch.start_failure import StartFailure, StartFailureKind

RUNNING = MemberState(Phase.RUNNING)


def exited(returncode: int, because_of: int | None = None, restarts: int = 0) -> MemberState:
    cause = ExitCause.from_returncode(returncode)
    if because_of is not None:
        cause = replace(cause, ended_for=EndedFor.PEER, because_of=because_of)
    return MemberState(Phase.EXITED, cause, restarts)


def running(ranks: int) -> TeamStateMachine:
    team = TeamStateMachine(ranks)
    team.take([(rank, ReaperEvent(ReaperEventKind.STARTED, 0.0)) for rank in range(ranks)])
    return team


def ended(at_s: float, code: int) -> ReaperEvent:
    return ReaperEvent(ReaperEventKind.ENDED, at_s, code)


def test_a_team_has_started_when_all_have() -> None:
    team = TeamStateMachine(2)
    team.take([(1, ReaperEvent(ReaperEventKind.STARTED, 0.0))])
    assert not team.has_started
    assert team.team.members == (MemberState(Phase.STARTING), RUNNING)
    team.take([(0, ReaperEvent(ReaperEventKind.STARTED, 1.0))])
    assert team.has_started


def test_a_member_has_exited_when_its_tree_has() -> None:
    team = running(1)
    team.take([(0, ended(1.0, 0))])
    assert team.team.members == (RUNNING,)
    team.reap(0, 2.0)
    assert team.team.members == (exited(0),)
    assert team.stop_level(0) == StopLevel.NONE


def test_the_first_in_time_is_to_blame_not_the_first_in_line() -> None:
    team = running(3)
    team.take([(0, ended(5.0, 1)), (2, ended(4.0, 7))])
    assert team.team.first_failure == 2
    team.take([(1, ended(3.0, -9))])
    assert team.team.first_failure == 1
    for rank in range(3):
        team.reap(rank, 6.0)
    assert team.team.members == (exited(1, because_of=1), exited(-9), exited(7, because_of=1))


def test_who_was_told_to_end_has_not_failed() -> None:
    team = running(1)
    team.stop(StopLevel.TERMINATE)
    team.take([(0, ended(1.0, -signal.SIGTERM))])
    team.reap(0, 1.0)
    assert team.team.first_failure is None
    asked = ExitCause(kind=ExitKind.SIGNALED, signal=signal.SIGTERM, ended_for=EndedFor.REQUEST)
    assert team.team.members[0].cause == asked


def test_an_ending_only_grows() -> None:
    team = running(1)
    for told, holds in [(StopLevel.TERMINATE, 1), (StopLevel.KILL, 2), (StopLevel.TERMINATE, 2)]:
        team.stop(told)
        assert team.stop_level(0) == holds


def test_one_that_cannot_be_started_ends_all_at_once() -> None:
    team = TeamStateMachine(2)
    team.take(
        [
            (0, ReaperEvent(ReaperEventKind.STARTED, 0.0)),
            (1, ReaperEvent(ReaperEventKind.REFUSED, 1.0, detail="no such file")),
        ]
    )
    assert team.start_failure == StartFailure(kind=StartFailureKind.COMMAND, rank=1, detail="no such file")
    assert team.stop_level(0) == StopLevel.KILL
    assert not team.has_started
    team.reap(1, 2.0)
    assert team.team.members == (RUNNING, MemberState(Phase.EXITED, ExitCause.refused("no such file")))


def test_a_guard_that_is_killed_is_a_failure() -> None:
    team = running(2)
    team.reap(1, 1.0)
    assert team.team.first_failure == 1
    assert team.stop_level(0) == StopLevel.TERMINATE
    assert team.team.members[1].phase == Phase.LOST


def test_what_cannot_be_killed_is_told() -> None:
    team = running(1)
    team.take([(0, ended(1.0, 0)), (0, ReaperEvent(ReaperEventKind.LEFT_OVER, 2.0, detail="12 is left"))])
    team.reap(0, 3.0)
    assert team.team.members == (MemberState(Phase.EXITED, ExitCause.from_returncode(0, detail="12 is left")),)


def test_a_group_ends_by_itself() -> None:
    team = TeamStateMachine(3, ((0, 1), (2,)))
    team.take([(rank, ReaperEvent(ReaperEventKind.STARTED, 0.0)) for rank in range(3)])
    team.take([(1, ended(1.0, -signal.SIGKILL))])
    assert [team.stop_level(rank) for rank in range(3)] == [StopLevel.TERMINATE, StopLevel.TERMINATE, StopLevel.NONE]
    team.take([(0, ended(2.0, -signal.SIGTERM))])
    for rank in (0, 1):
        team.reap(rank, 3.0)
    assert team.team.members == (exited(-signal.SIGTERM, because_of=1), exited(-signal.SIGKILL), RUNNING)
    assert team.team.first_failure == 1
    assert not team.team.has_ended
    team.stop(StopLevel.TERMINATE)
    assert team.stop_level(2) == StopLevel.TERMINATE


def test_one_that_cannot_be_started_ends_all_groups() -> None:
    team = TeamStateMachine(2, ((0,), (1,)))
    team.take(
        [
            (0, ReaperEvent(ReaperEventKind.STARTED, 0.0)),
            (1, ReaperEvent(ReaperEventKind.REFUSED, 1.0, detail="no such file")),
        ]
    )
    assert [team.stop_level(rank) for rank in range(2)] == [StopLevel.KILL, StopLevel.KILL]


def in_groups(restarts: int) -> TeamStateMachine:
    team = TeamStateMachine(3, ((0, 1), (2,)), restarts)
    team.take([(rank, ReaperEvent(ReaperEventKind.STARTED, 0.0)) for rank in range(3)])
    return team


def lose(team: TeamStateMachine, *codes: tuple[int, int]) -> None:
    team.take([(rank, ended(1.0 + number, code)) for number, (rank, code) in enumerate(codes)])
    for rank, _ in codes:
        team.reap(rank, 9.0)


def test_a_lost_group_restarts_as_often_as_it_may() -> None:
    team = in_groups(restarts=2)
    team.take([(1, ended(1.0, -signal.SIGKILL))])
    team.reap(1, 2.0)
    assert team.lost() == ()  # rank 0 is not gone yet
    lose(team, (0, -signal.SIGTERM))
    assert team.lost() == (0,)
    assert team.restart_group(0) == [0, 1]
    assert team.team.first_failure is None
    before = MemberState(Phase.STARTING, ExitCause.from_returncode(-signal.SIGKILL), 1)
    assert team.team.members[1:] == (before, RUNNING)
    assert [team.stop_level(rank) for rank in range(3)] == [StopLevel.NONE] * 3
    assert team.lost() == ()
    team.take([(rank, ReaperEvent(ReaperEventKind.STARTED, 10.0)) for rank in (0, 1)])
    assert team.team.members[1].phase == Phase.RUNNING
    lose(team, (2, 1))
    assert team.lost() == (1,)  # any group
    assert team.restart_group(1) == [2]
    team.take([(2, ReaperEvent(ReaperEventKind.STARTED, 11.0))])
    lose(team, (0, 1), (1, -signal.SIGTERM))
    assert team.lost() == ()
    assert team.team.members[0] == exited(1, restarts=1)


def test_who_does_not_return() -> None:
    told = in_groups(restarts=9)
    lose(told, (2, 1))
    told.stop(StopLevel.TERMINATE)
    assert told.lost() == ()
    for code in (0, 2, 75):
        team = in_groups(restarts=9)
        lose(team, (2, code))
        assert team.lost() == ()
    saved = in_groups(restarts=9)
    lose(saved, (2, 1))
    saved.take([(0, ended(3.0, 75))])  # as all others will
    assert saved.lost() == ()
    abandoned = in_groups(restarts=9)
    lose(abandoned, (2, 1))
    abandoned.abandon(1)
    assert abandoned.lost() == ()
    stuck = in_groups(restarts=9)
    stuck.take([(2, ended(1.0, 1)), (2, ReaperEvent(ReaperEventKind.LEFT_OVER, 2.0, detail="12 is left"))])
    stuck.reap(2, 3.0)
    assert stuck.lost() == ()
    whole = TeamStateMachine(2, restarts=9, has_remote_members=True)
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
    elsewhere = TeamStateMachine(1, ((0,),), restarts=9, has_remote_members=True)
    lose(elsewhere, (0, 1))
    assert elsewhere.lost() == (0,)


def test_one_that_cannot_be_started_again_ends_no_other() -> None:
    team = in_groups(restarts=1)
    lose(team, (2, 1))
    assert team.restart_group(1) == [2]
    team.take([(2, ReaperEvent(ReaperEventKind.REFUSED, 9.0, detail="no such file"))])
    team.reap(2, 9.0)
    assert team.start_failure is None
    assert team.stop_level(0) == StopLevel.NONE
    assert team.team.members[2] == MemberState(Phase.EXITED, ExitCause.refused("no such file"), 1)
