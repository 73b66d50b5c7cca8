"""What a supervisor knows of its team, and what is to be done about it: a state machine that touches no process."""

from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum

from mimatrix.core.exit_codes import BAD_INPUT, PREEMPTED
from mimatrix.launch.exit_causes import EndedFor, ExitCause, ExitKind
from mimatrix.launch.launcher import MemberState, Phase, TeamState
from mimatrix.launch.local.reaper import ReaperEvent, ReaperEventKind
from mimatrix.launch.start_failure import StartFailure, StartFailureKind

_ENDED = (Phase.EXITED, Phase.LOST)


class StopLevel(IntEnum):
    """How far members are to be ended; it only grows."""

    NONE = 0
    TERMINATE = 1
    """SIGTERM, and SIGKILL after the grace period."""
    KILL = 2


class TeamStateMachine:
    """Takes what is reported about the members, in any order; knows how the team is and whether to end it."""

    def __init__(
        self, ranks: int, groups: Sequence[Sequence[int]] = (), restarts: int = 0, *, has_remote_members: bool = False
    ) -> None:
        self.start_failure: StartFailure | None = None
        self._restarts_left = restarts
        self._is_over, self._has_remote_members = False, has_remote_members
        self._abandoned: set[int] = set()
        self._groups = {rank: number for number, group in enumerate(groups) for rank in group}
        """Which ranks end together; those in no group are one."""
        self._levels = dict.fromkeys([self._group(rank) for rank in range(ranks)], StopLevel.NONE)
        self._ended_for: dict[int, tuple[EndedFor, int | None]] = {}
        """By group: why it is ended, and because of which rank."""
        self._failures: dict[int, tuple[float, int]] = {}
        """By group: the first."""
        self._members = [MemberState(Phase.STARTING)] * ranks
        self._codes: dict[int, int] = {}
        self._left_over: dict[int, str] = {}

    @property
    def team(self) -> TeamState:
        """How the team is."""
        _, first = min(self._failures.values(), default=(0.0, None))
        return TeamState(tuple(self._members), first, start_failure=self.start_failure)

    @property
    def has_started(self) -> bool:
        """Whether all members have started; false for good once one of them was refused."""
        return all(member.phase != Phase.STARTING for member in self._members) and not self.start_failure

    @property
    def is_stopping(self) -> bool:
        """Whether any member is to end."""
        return any(self._levels.values())

    def stop_level(self, rank: int) -> StopLevel:
        """Return how far this member is to be ended."""
        return self._levels[self._group(rank)]

    def stop(self, level: StopLevel) -> None:
        """End the whole team, as the launcher was told to."""
        self._is_over = True
        for group in self._levels:
            self._stop_group(group, level, EndedFor.REQUEST)

    def refuse(self, failure: StartFailure) -> None:
        """Note that no member can be started."""
        self.start_failure = failure
        self._members = [MemberState(Phase.EXITED, ExitCause.refused(failure.detail))] * len(self._members)

    def cancel(self) -> None:
        """Note that the team was told to end before any member was started."""
        cause = ExitCause(kind=ExitKind.CANCELLED, ended_for=EndedFor.REQUEST)
        self._members = [MemberState(Phase.EXITED, cause)] * len(self._members)

    def take(self, events: Sequence[tuple[int, ReaperEvent]]) -> None:
        """Take events of reapers, with the ranks of their members."""
        # Several may have come at once, and the first of them is to blame.
        for rank, event in sorted(events, key=lambda reported: reported[1].at_s):
            self._take(rank, event)

    def reap(self, rank: int, at_s: float) -> None:
        """Note that the reaper of this member is gone, after all that it had to report."""
        if rank in self._codes:
            self._end_member(rank, Phase.EXITED, self._cause(rank))
        elif self._members[rank].phase != Phase.EXITED:
            self._end_member(rank, Phase.LOST, ExitCause.lost("its reaper was killed"))
            self._fail(rank, at_s)

    def lost(self) -> tuple[int, ...]:
        """Return the groups that were lost while others run, and that may be restarted."""
        if not self._restarts_left or self._is_over or self.start_failure or PREEMPTED in self._codes.values():
            return ()
        failed = (group for group in self._failures if group >= 0 and group not in self._abandoned)
        return tuple(group for group in failed if self._may_restart(group))

    def restart_group(self, group: int) -> list[int]:
        """Note that this group is restarted now, and return its ranks."""
        ranks = self._ranks(group)
        self._restarts_left -= 1
        self._restart(group, ranks)
        return ranks

    def abandon(self, group: int) -> None:
        """Note that this group is never restarted."""
        self._abandoned.add(group)

    def _may_restart(self, group: int) -> bool:
        """Whether nothing of it is left, its input was not bad, and there is a rank to rejoin."""
        ranks = self._ranks(group)
        others = [rank for rank in range(len(self._members)) if rank not in ranks]
        return (
            all(self._members[rank].phase in _ENDED and rank not in self._left_over for rank in ranks)
            and all(self._codes.get(rank) != BAD_INPUT for rank in ranks)
            and (self._has_remote_members or any(self._keeps_running(rank) for rank in others))
        )

    def _keeps_running(self, rank: int) -> bool:
        is_running = self._members[rank].phase == Phase.RUNNING and rank not in self._codes
        return is_running and self.stop_level(rank) == StopLevel.NONE

    def _ranks(self, group: int) -> list[int]:
        return [rank for rank in range(len(self._members)) if self._group(rank) == group]

    def _restart(self, group: int, ranks: Sequence[int]) -> None:
        self._levels[group] = StopLevel.NONE
        self._ended_for.pop(group, None)
        del self._failures[group]
        for rank in ranks:
            before = self._members[rank]
            self._members[rank] = MemberState(Phase.STARTING, before.cause, before.restarts + 1)
            self._codes.pop(rank, None)
            self._left_over.pop(rank, None)

    def _take(self, rank: int, event: ReaperEvent) -> None:
        match event.kind:
            case ReaperEventKind.STARTED:
                self._members[rank] = replace(self._members[rank], phase=Phase.RUNNING)
            case ReaperEventKind.REFUSED:
                self._take_refusal(rank, event)
            case ReaperEventKind.ENDED:
                self._codes[rank] = event.code
                if event.code:
                    self._fail(rank, event.at_s)
            case ReaperEventKind.LEFT_OVER:
                self._left_over[rank] = event.detail

    def _take_refusal(self, rank: int, event: ReaperEvent) -> None:
        self._end_member(rank, Phase.EXITED, ExitCause.refused(event.detail))
        self._fail(rank, event.at_s)
        if self._members[rank].restarts:
            return  # other groups run
        # A team is started as a whole, or not at all.
        self.start_failure = self.start_failure or StartFailure(
            kind=StartFailureKind.COMMAND, rank=rank, detail=event.detail, is_transient=event.is_transient
        )
        for group in self._levels:
            self._stop_group(group, StopLevel.KILL, EndedFor.PEER, rank)

    def _fail(self, rank: int, at_s: float) -> None:
        """Note a failure; one that comes after the group was told to end does not count."""
        group = self._group(rank)
        first = self._failures.get(group)
        if self._levels[group] == StopLevel.NONE or (first and at_s < first[0]):
            self._failures[group] = at_s, rank
            self._ended_for[group] = EndedFor.PEER, rank
        self._levels[group] = max(self._levels[group], StopLevel.TERMINATE)

    def _end_member(self, rank: int, phase: Phase, cause: ExitCause) -> None:
        self._members[rank] = MemberState(phase, cause, self._members[rank].restarts)

    def _stop_group(self, group: int, level: StopLevel, ended_for: EndedFor, because_of: int | None = None) -> None:
        self._levels[group] = max(self._levels[group], level)
        self._ended_for.setdefault(group, (ended_for, because_of))

    def _group(self, rank: int) -> int:
        return self._groups.get(rank, -1)

    def _cause(self, rank: int) -> ExitCause:
        """How it ended, and whether that was because of another rank or a request."""
        cause = ExitCause.from_returncode(self._codes[rank], detail=self._left_over.get(rank, ""))
        ended_for, because_of = self._ended_for.get(self._group(rank), (EndedFor.NONE, None))
        if cause.is_clean or because_of == rank:
            return cause
        return replace(cause, ended_for=ended_for, because_of=because_of)
