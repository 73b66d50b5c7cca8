"""What a supervisor knows of its team, and what is to be done about it: a state machine that touches no process."""

from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum

from mimatrix.core.exit_codes import BAD_INPUT, PREEMPTED
from mimatrix.launch.exit_causes import EndedFor, ExitCause, ExitKind
from mimatrix.launch.launcher import MemberState, Phase, TeamState
from mimatrix.launch.local.reaper import Kind, Report

_ENDED = (Phase.EXITED, Phase.LOST)


class Ending(IntEnum):
    """How far members are to be ended; it only grows."""

    NOT = 0
    WITH_GRACE = 1
    NOW = 2


class Ledger:
    """Take what is heard of the members, in any order; say how the team is and whether to end it."""

    def __init__(
        self, ranks: int, groups: Sequence[Sequence[int]] = (), restarts: int = 0, *, others: bool = False
    ) -> None:
        self.refusal = ""
        self._restarts_left = restarts
        self._is_over, self._others = False, others
        self._abandoned: set[int] = set()
        self._groups = {rank: number for number, group in enumerate(groups) for rank in group}
        """Which ranks end together; those in no group are one."""
        self._endings = dict.fromkeys([self._group(rank) for rank in range(ranks)], Ending.NOT)
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
        return TeamState(tuple(self._members), first)

    @property
    def has_started(self) -> bool:
        """Whether all members have started; false for good once one of them was refused."""
        return all(member.phase != Phase.STARTING for member in self._members) and not self.refusal

    @property
    def is_told(self) -> bool:
        """Whether any member is to end."""
        return any(self._endings.values())

    def ending_of(self, rank: int) -> Ending:
        """Return how far this member is to be ended."""
        return self._endings[self._group(rank)]

    def tell(self, ending: Ending) -> None:
        """End the whole team, as the launcher was told to."""
        self._is_over = True
        for group in self._endings:
            self._end(group, ending, EndedFor.REQUEST)

    def refuse(self, sentence: str) -> None:
        """Note that no member can be started."""
        self.refusal = sentence
        self._members = [MemberState(Phase.EXITED, ExitCause.refused(sentence))] * len(self._members)

    def cancel(self) -> None:
        """Note that the team was told to end before any member was started."""
        cause = ExitCause(kind=ExitKind.CANCELLED, ended_for=EndedFor.REQUEST)
        self._members = [MemberState(Phase.EXITED, cause)] * len(self._members)

    def take(self, reports: Sequence[tuple[int, Report]]) -> None:
        """Take reports of guards, with the ranks of their members."""
        # Several may have come at once, and the first of them is to blame.
        for rank, report in sorted(reports, key=lambda each: each[1].at_s):
            self._take(rank, report)

    def leave(self, rank: int, at_s: float) -> None:
        """Note that the guard of this member is gone, after all that it had to report."""
        if rank in self._codes:
            self._end_member(rank, Phase.EXITED, self._cause(rank))
        elif self._members[rank].phase != Phase.EXITED:
            self._end_member(rank, Phase.LOST, ExitCause.lost("its guard was killed"))
            self._fail(rank, at_s)

    def lost(self) -> tuple[int, ...]:
        """Return the groups that were lost while others run, and that may be restarted."""
        if not self._restarts_left or self._is_over or self.refusal or PREEMPTED in self._codes.values():
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
            and (self._others or any(self._keeps_running(rank) for rank in others))
        )

    def _keeps_running(self, rank: int) -> bool:
        is_running = self._members[rank].phase == Phase.RUNNING and rank not in self._codes
        return is_running and self.ending_of(rank) == Ending.NOT

    def _ranks(self, group: int) -> list[int]:
        return [rank for rank in range(len(self._members)) if self._group(rank) == group]

    def _restart(self, group: int, ranks: Sequence[int]) -> None:
        self._endings[group] = Ending.NOT
        self._ended_for.pop(group, None)
        del self._failures[group]
        for rank in ranks:
            before = self._members[rank]
            self._members[rank] = MemberState(Phase.STARTING, before.cause, before.restarts + 1)
            self._codes.pop(rank, None)
            self._left_over.pop(rank, None)

    def _take(self, rank: int, report: Report) -> None:
        match report.kind:
            case Kind.STARTED:
                self._members[rank] = replace(self._members[rank], phase=Phase.RUNNING)
            case Kind.REFUSED:
                self._take_refusal(rank, report)
            case Kind.ENDED:
                self._codes[rank] = report.code
                if report.code:
                    self._fail(rank, report.at_s)
            case Kind.LEFT:
                self._left_over[rank] = report.text

    def _take_refusal(self, rank: int, report: Report) -> None:
        self._end_member(rank, Phase.EXITED, ExitCause.refused(report.text))
        self._fail(rank, report.at_s)
        if self._members[rank].restarts:
            return  # the other groups run
        # A team is started as a whole, or not at all.
        self.refusal = self.refusal or f"rank {rank} cannot be started: {report.text}"
        for group in self._endings:
            self._end(group, Ending.NOW, EndedFor.PEER, rank)

    def _fail(self, rank: int, at_s: float) -> None:
        """Note a failure; one that comes after the group was told to end does not count."""
        group = self._group(rank)
        first = self._failures.get(group)
        if self._endings[group] == Ending.NOT or (first and at_s < first[0]):
            self._failures[group] = at_s, rank
            self._ended_for[group] = EndedFor.PEER, rank
        self._endings[group] = max(self._endings[group], Ending.WITH_GRACE)

    def _end_member(self, rank: int, phase: Phase, cause: ExitCause) -> None:
        self._members[rank] = MemberState(phase, cause, self._members[rank].restarts)

    def _end(self, group: int, ending: Ending, ended_for: EndedFor, because_of: int | None = None) -> None:
        self._endings[group] = max(self._endings[group], ending)
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
