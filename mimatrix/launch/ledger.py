"""What a keeper knows of its team and what is to be done about it. No process is touched here."""

import signal
from collections.abc import Sequence
from enum import IntEnum

from mimatrix.launch.guard import Kind, Report
from mimatrix.launch.launcher import MemberState, Phase, TeamState

CANNOT_RUN = 126
"""The exit code of what could not be started, as in a shell."""


class Ending(IntEnum):
    """How far all members are to be ended; it only grows."""

    NOT = 0
    WITH_GRACE = 1
    NOW = 2


class Ledger:
    """Takes what is heard of the members, in any order; says how the team is and whether to end it."""

    def __init__(self, ranks: int) -> None:
        self.ending = Ending.NOT
        self.refusal = ""
        self._members = [MemberState(Phase.STARTING)] * ranks
        self._codes: dict[int, int] = {}
        self._left: dict[int, str] = {}
        self._why = ""
        self._failure: tuple[float, int] | None = None

    @property
    def team(self) -> TeamState:
        """How the team is."""
        return TeamState(tuple(self._members), self._failure[1] if self._failure else None)

    @property
    def has_started(self) -> bool:
        """Whether all members have, or none ever will."""
        return all(member.phase != Phase.STARTING for member in self._members) and not self.refusal

    def tell(self, ending: Ending) -> None:
        """Somebody wants the team to end."""
        self._end(ending, "told to end")

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
            self._members[rank] = MemberState(Phase.EXITED, self._codes[rank], self._reason(rank))
        elif self._members[rank].phase != Phase.EXITED:
            self._members[rank] = MemberState(Phase.LOST, reason="its guard was killed")
            self._fail(rank, at_s)

    def _take(self, rank: int, report: Report) -> None:
        match report.kind:
            case Kind.STARTED:
                self._members[rank] = MemberState(Phase.RUNNING)
            case Kind.REFUSED:
                self._members[rank] = MemberState(Phase.EXITED, CANNOT_RUN, report.text)
                self.refusal = self.refusal or f"rank {rank} cannot be started: {report.text}"
                self._fail(rank, report.at_s)
                self._end(Ending.NOW, self._why)
            case Kind.ENDED:
                self._codes[rank] = report.code
                if report.code:
                    self._fail(rank, report.at_s)
            case Kind.LEFT:
                self._left[rank] = report.text

    def _fail(self, rank: int, at_s: float) -> None:
        """Who fails after the team was told to end does not count."""
        if self.ending == Ending.NOT or (self._failure and at_s < self._failure[0]):
            self._failure = at_s, rank
            self._why = f"ended because rank {rank} failed"
        self.ending = max(self.ending, Ending.WITH_GRACE)

    def _end(self, ending: Ending, why: str) -> None:
        self.ending = max(self.ending, ending)
        self._why = self._why or why

    def _reason(self, rank: int) -> str:
        code = self._codes[rank]
        how = f"exit code {code}" if code > 0 else f"killed by {_signal_name(-code)}"
        is_own = not self._why or (self._failure is not None and self._failure[1] == rank)
        said = [how] * bool(code) + [self._why] * bool(code and not is_own) + [self._left.get(rank, "")]
        return "; ".join(filter(None, said))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
