"""Ranks that wait for each other in different calls, so that none can continue. No sockets, and no clock.

A rank whose user's thread waits says which ranks must come to which call of which group, and which calls it has begun
itself. If ranks need each other in a circle, they are asked a second time. Numbers of calls only grow, so a rank that
gives the same answer has waited all the time between: then all of the circle waited at one moment, and none can come.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mimatrix.comm.control.user_calls import UserCall
from mimatrix.comm.control.wait_graph import Query


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedRank:
    """What the user's thread of one rank waits for: that `needs` begin call `number` of a group."""

    group: str
    number: int
    needs: tuple[int, ...]
    begun: Mapping[str, int]
    """The last call of each group that this rank has begun itself."""
    background: frozenset[str] = frozenset()
    """Groups in which another thread of this rank makes calls: it may still come to them."""
    call: UserCall | None = None

    @classmethod
    def from_json(cls, body: dict[str, Any] | None) -> "BlockedRank | None":
        """Return what a rank's message says; None if it does not wait."""
        if body is None:
            return None
        return cls(
            group=str(body["group"]),
            number=int(body["number"]),
            needs=tuple(int(rank) for rank in body["needs"]),
            begun={str(group): int(number) for group, number in body["begun"].items()},
            background=frozenset(str(group) for group in body["background"]),
            call=UserCall.from_json(body["call"]),
        )

    def find_ended(self, ended: Mapping[int, Mapping[str, int]]) -> list[int]:
        """Return the ranks that this one waits for in vain; `ended` has the last calls of those that have ended."""
        return [rank for rank in self.needs if rank in ended and ended[rank].get(self.group, -1) < self.number]

    def waits_like(self, other: "BlockedRank | None") -> bool:
        """Return whether this is the same wait as another."""
        return other is not None and (self.group, self.number) == (other.group, other.number)

    def cannot_reach(self, other: "BlockedRank") -> bool:
        """Return whether this rank has not come to what `other` waits for, and cannot while it waits itself."""
        return self.begun.get(other.group, -1) < other.number and other.group not in self.background


@dataclass(frozen=True, slots=True)
class Deadlock:
    """Two ranks that wait for each other, directly or not, and the calls in which they do."""

    calls: dict[int, UserCall | None]


@dataclass(slots=True)
class DeadlockSearch:
    """The ranks that wait, and a circle of them that is being asked a second time."""

    blocked: dict[int, BlockedRank] = field(default_factory=dict)
    unconfirmed: set[int] = field(default_factory=set)
    circle: tuple[int, ...] = ()

    def report(self, rank: int, blocked: BlockedRank | None) -> Query | None:
        """Take a rank's report that it waits; return whom to ask a second time, if it closes a circle."""
        if blocked is None:
            self.blocked.pop(rank, None)
            return None
        self.blocked[rank] = blocked
        self.circle = self._find_circle(rank)
        self.unconfirmed = set(self.circle)
        return Query(self.circle) if self.circle else None

    def answer(self, rank: int, blocked: BlockedRank | None) -> Deadlock | None:
        """Take a rank's answer; return the deadlock if all of the circle still wait as they did."""
        before = self.blocked.get(rank)
        if rank not in self.unconfirmed or before is None:
            return None
        if blocked is None or not blocked.waits_like(before):
            del self.blocked[rank]
            self.circle, self.unconfirmed = (), set()
            return None
        self.blocked[rank] = blocked
        self.unconfirmed.discard(rank)
        if self.unconfirmed or not self._is_circle(self.circle):
            return None
        return Deadlock({rank: self.blocked[rank].call for rank in self._choose_pair()})

    def _find_circle(self, start: int) -> tuple[int, ...]:
        """Return ranks that need each other in a circle, beginning at `start`."""
        paths: list[tuple[int, ...]] = [(start,)]
        seen = {start}
        while paths:
            path = paths.pop()
            for rank in self._needed(path[-1]):
                if rank == start:
                    return path
                if rank not in seen:
                    seen.add(rank)
                    paths.append((*path, rank))
        return ()

    def _needed(self, rank: int) -> list[int]:
        wait = self.blocked[rank]
        return [other for other in wait.needs if other in self.blocked and self.blocked[other].cannot_reach(wait)]

    def _is_circle(self, ranks: tuple[int, ...]) -> bool:
        return all(after in self._needed(rank) for rank, after in zip(ranks, (*ranks[1:], ranks[0]), strict=True))

    def _choose_pair(self) -> tuple[int, int]:
        """Return two neighbours of the circle, whose calls differ if any do."""
        pairs = list(zip(self.circle, (*self.circle[1:], self.circle[0]), strict=True))
        keys = {rank: call.key if (call := self.blocked[rank].call) else "" for rank in self.circle}
        return min(pairs, key=lambda pair: (keys[pair[0]] == keys[pair[1]], sorted(pair)))
