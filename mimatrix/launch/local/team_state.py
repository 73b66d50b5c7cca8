"""What a keeper knows of its team and what is to be done about it. No process is touched here."""

import signal
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum

from mimatrix.launch.launcher import MemberState, Phase, TeamState
from mimatrix.launch.local.reaper import Kind, Report

CANNOT_RUN = 126
"""The exit code of what could not be started, as in a shell."""
_BAD_INPUT, _LEFT = 2, 75
"""Exit codes after which nobody returns: what is bad stays bad, and who saved and left was told to, with all others."""
_ENDED = (Phase.EXITED, Phase.LOST)


class Ending(IntEnum):
    """How far members are to be ended; it only grows."""

    NOT = 0
    WITH_GRACE = 1
    NOW = 2


class Ledger:
    """Takes what is heard of the members, in any order; says how the team is and whether to end it."""

    def __init__(
        self, ranks: int, groups: Sequence[Sequence[int]] = (), returns: int = 0, *, others: bool = False
    ) -> None:
        self.refusal = ""
        self._returns_left = returns
        self._is_over, self._others = False, others
        self._given_up: set[int] = set()
        self._groups = {rank: number for number, group in enumerate(groups) for rank in group}
        """Who ends with whom; those of none are one."""
        self._endings = dict.fromkeys([self._group(rank) for rank in range(ranks)], Ending.NOT)
        self._whys = dict.fromkeys(self._endings, "")
        self._failures: dict[int, tuple[float, int]] = {}
        """By group: the first."""
        self._members = [MemberState(Phase.STARTING)] * ranks
        self._codes: dict[int, int] = {}
        self._left: dict[int, str] = {}

    @property
    def team(self) -> TeamState:
        """How the team is."""
        _, first = min(self._failures.values(), default=(0.0, None))
        return TeamState(tuple(self._members), first)

    @property
    def has_started(self) -> bool:
        """Whether all members have, or none ever will."""
        return all(member.phase != Phase.STARTING for member in self._members) and not self.refusal

    @property
    def is_told(self) -> bool:
        """Whether anybody is to end."""
        return any(self._endings.values())

    def ending_of(self, rank: int) -> Ending:
        """How far this member is to be ended."""
        return self._endings[self._group(rank)]

    def tell(self, ending: Ending) -> None:
        """Somebody wants the team to end."""
        self._is_over = True
        for group in self._endings:
            self._end(group, ending, "told to end")

    def refuse(self, sentence: str) -> None:
        """No member can be started."""
        self.refusal = sentence
        self._members = [MemberState(Phase.EXITED, CANNOT_RUN, sentence)] * len(self._members)

    def cancel(self) -> None:
        """No member is started, since the team was told to end before."""
        never = MemberState(Phase.EXITED, -signal.SIGTERM, "told to end before it was started")
        self._members = [never] * len(self._members)

    def take(self, reports: Sequence[tuple[int, Report]]) -> None:
        """Reports of guards, with the ranks of their members."""
        # Several may have come at once, and the first of them is to blame.
        for rank, report in sorted(reports, key=lambda each: each[1].at_s):
            self._take(rank, report)

    def leave(self, rank: int, at_s: float) -> None:
        """The guard of this member is gone, after all that it had to report."""
        if rank in self._codes:
            self._end_member(rank, Phase.EXITED, self._codes[rank], self._reason(rank))
        elif self._members[rank].phase != Phase.EXITED:
            self._end_member(rank, Phase.LOST, None, "its guard was killed")
            self._fail(rank, at_s)

    def lost(self) -> tuple[int, ...]:
        """Groups that were lost while others run, and may be started again."""
        if not self._returns_left or self._is_over or self.refusal or _LEFT in self._codes.values():
            return ()
        failed = (group for group in self._failures if group >= 0 and group not in self._given_up)
        return tuple(group for group in failed if self._may_return(group))

    def return_group(self, group: int) -> list[int]:
        """It is started again, now: its ranks."""
        ranks = self._ranks(group)
        self._returns_left -= 1
        self._return(group, ranks)
        return ranks

    def give_up(self, group: int) -> None:
        """It does not return."""
        self._given_up.add(group)

    def _may_return(self, group: int) -> bool:
        """Whether nothing of it is left, its input was not bad, and there is somebody to return to."""
        ranks = self._ranks(group)
        others = [rank for rank in range(len(self._members)) if rank not in ranks]
        return (
            all(self._members[rank].phase in _ENDED and rank not in self._left for rank in ranks)
            and all(self._codes.get(rank) != _BAD_INPUT for rank in ranks)
            and (self._others or any(self._goes_on(rank) for rank in others))
        )

    def _goes_on(self, rank: int) -> bool:
        is_running = self._members[rank].phase == Phase.RUNNING and rank not in self._codes
        return is_running and self.ending_of(rank) == Ending.NOT

    def _ranks(self, group: int) -> list[int]:
        return [rank for rank in range(len(self._members)) if self._group(rank) == group]

    def _return(self, group: int, ranks: Sequence[int]) -> None:
        self._endings[group], self._whys[group] = Ending.NOT, ""
        del self._failures[group]
        for rank in ranks:
            before = self._members[rank]
            self._members[rank] = MemberState(Phase.STARTING, None, before.reason, before.returns + 1)
            self._codes.pop(rank, None)
            self._left.pop(rank, None)

    def _take(self, rank: int, report: Report) -> None:
        match report.kind:
            case Kind.STARTED:
                self._members[rank] = replace(self._members[rank], phase=Phase.RUNNING)
            case Kind.REFUSED:
                self._end_member(rank, Phase.EXITED, CANNOT_RUN, report.text)
                self._fail(rank, report.at_s)
                if self._members[rank].returns:
                    return  # the others run
                # A team is started as a whole, or not at all.
                self.refusal = self.refusal or f"rank {rank} cannot be started: {report.text}"
                for group in self._endings:
                    self._end(group, Ending.NOW, self._whys[self._group(rank)])
            case Kind.ENDED:
                self._codes[rank] = report.code
                if report.code:
                    self._fail(rank, report.at_s)
            case Kind.LEFT:
                self._left[rank] = report.text

    def _fail(self, rank: int, at_s: float) -> None:
        """Who fails after it was told to end does not count."""
        group = self._group(rank)
        first = self._failures.get(group)
        if self._endings[group] == Ending.NOT or (first and at_s < first[0]):
            self._failures[group] = at_s, rank
            self._whys[group] = f"ended because rank {rank} failed"
        self._endings[group] = max(self._endings[group], Ending.WITH_GRACE)

    def _end_member(self, rank: int, phase: Phase, code: int | None, reason: str) -> None:
        self._members[rank] = MemberState(phase, code, reason, self._members[rank].returns)

    def _end(self, group: int, ending: Ending, why: str) -> None:
        self._endings[group] = max(self._endings[group], ending)
        self._whys[group] = self._whys[group] or why

    def _group(self, rank: int) -> int:
        return self._groups.get(rank, -1)

    def _reason(self, rank: int) -> str:
        code = self._codes[rank]
        how = f"exit code {code}" if code > 0 else f"killed by {_signal_name(-code)}"
        why, (_, first) = self._whys[self._group(rank)], self._failures.get(self._group(rank), (0.0, None))
        is_own = not why or first == rank
        said = [how] * bool(code) + [why] * bool(code and not is_own) + [self._left.get(rank, "")]
        return "; ".join(filter(None, said))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
