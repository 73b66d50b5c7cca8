"""Which rank did not come to a native call that does not finish. No sockets, and no clock of its own.

Inside NCCL or Gloo a rank cannot say for whom it waits. So all members are asked which call they have begun last: one
that has not begun the call, or does not answer, is to blame. Complaints about several calls are followed separately.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mimatrix.comm.control.user_calls import UserCall
from mimatrix.comm.control.wait_graph import ANSWER_S, Culprit, Query
from mimatrix.core.errors import WorldError

_MAX_COMPLAINTS = 64


def begun_name(group: str) -> str:
    """Return the name under which a rank's state has the number of the group's last native call."""
    return f"{group}/calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What a rank answers when it is asked."""

    begun: Mapping[str, int]
    """The last call of each group that it has begun."""
    waits_for: int | None = None
    call: UserCall | None = None
    """The call that the user's script is in."""

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> "RankState":
        """Return what a rank's message says.

        Raises:
            WorldError: A field is missing or of the wrong type.
        """
        match body:
            case {"begun": dict(begun), "waits_for": None | int() as waits_for, "call": call} if all(
                type(number) is int for number in begun.values()
            ):
                return cls(begun=begun, waits_for=waits_for, call=UserCall.from_json(call))
        raise WorldError("the state of a rank is corrupt: its fields are not those of a state; check who sent it")


@dataclass(frozen=True, slots=True)
class WaitingRank:
    """A rank that did not come because it waits itself for another one, which is the next to be asked."""

    rank: int
    waits_for: int
    waited_s: float


@dataclass(slots=True, kw_only=True)
class UnfinishedCall:
    """A call that does not finish on some rank, and what the members have answered about it."""

    group: str
    number: int
    members: tuple[int, ...]
    waited_s: float
    until_s: float
    states: dict[int, RankState] = field(default_factory=dict)

    @classmethod
    def from_json(cls, body: dict[str, Any], now_s: float) -> "UnfinishedCall":
        """Return the call that a rank complains about.

        Raises:
            WorldError: A field is missing or of the wrong type.
        """
        match body:
            case {
                "call": [str(group), int(number)],
                "members": [_, *_] as members,
                "waited_s": int() | float() as waited_s,
            } if all(type(rank) is int for rank in members):
                return cls(
                    group=group,
                    number=number,
                    members=tuple(dict.fromkeys(members)),
                    waited_s=waited_s,
                    until_s=now_s + ANSWER_S,
                )
        raise WorldError("a complaint is corrupt: its fields are not those of a call; check who sent it")

    def find_ended(self, ended: Mapping[int, Mapping[str, int]]) -> list[int]:
        """Return the members that ended before the call; `ended` has the last calls of all that have ended."""
        for rank in self.members:
            if rank in ended:
                self.states[rank] = RankState(begun=ended[rank])
        return [rank for rank in self.members if rank in ended and not self._has_come(rank)]

    def is_decidable(self, now_s: float) -> bool:
        """Return whether all members have answered, or had the time to."""
        return len(self.states) == len(self.members) or now_s >= self.until_s

    def decide(self) -> Culprit | WaitingRank | None:
        """Return the member that did not come; None if all have come."""
        reason = f"it did not come for {self.waited_s:.1f} s"
        if silent := [rank for rank in self.members if rank not in self.states]:
            return Culprit(min(silent), f"{reason} and does not answer")
        late = [rank for rank in self.members if not self._has_come(rank)]
        if not late:
            return None
        rank = min(late, key=lambda rank: (self._rate_excuse(rank), rank))
        state = self.states[rank]
        if state.waits_for is not None and state.waits_for not in self.members:
            return WaitingRank(rank, state.waits_for, self.waited_s)
        return Culprit(rank, f"{reason}; it is in {state.call}" if state.call else reason)

    def _rate_excuse(self, rank: int) -> int:
        """Return 0 for a late rank that waits for no other, 1 for a rank outside the group, 2 for a member."""
        waits_for = self.states[rank].waits_for
        return 0 if waits_for is None else 2 if waits_for in self.members else 1

    def _has_come(self, rank: int) -> bool:
        return self.states[rank].begun.get(begun_name(self.group), 0) >= self.number


@dataclass(slots=True)
class UnfinishedCalls:
    """All complaints about calls that do not finish."""

    calls: dict[tuple[str, int], UnfinishedCall] = field(default_factory=dict)

    def complain(self, call: UnfinishedCall) -> Query | None:
        """Take a complaint and return whom to ask; None if that is already being found out."""
        if (call.group, call.number) in self.calls or len(self.calls) >= _MAX_COMPLAINTS:
            return None
        self.calls[call.group, call.number] = call
        return Query(call.members)

    def answer(self, rank: int, state: RankState) -> None:
        """Take a rank's answer."""
        for call in self.calls.values():
            if rank in call.members:
                call.states[rank] = state

    def decide(self, now_s: float) -> list[Culprit | WaitingRank]:
        """End the complaints that can be decided, and return who is to blame; a rank that has come to all is not."""
        decided = [key for key, call in self.calls.items() if call.is_decidable(now_s)]
        outcomes = [self.calls.pop(key).decide() for key in decided]
        return list(dict.fromkeys(outcome for outcome in outcomes if outcome))
