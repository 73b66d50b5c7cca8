"""What a rank knows of others that are gone and of calls that failed, and the errors that follow. No sockets."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from mimatrix.comm.control.faults import Fault
from mimatrix.comm.control.user_calls import UserCall, describe_ended
from mimatrix.core.errors import DifferentCalls, PeerLost, UserError, WorldError


@dataclass(frozen=True, slots=True)
class RankLoss:
    """Why a rank is gone."""

    reason: str
    has_left: bool = False
    """Whether it said goodbye: it was done, and only a rank that waits for it misses it."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"reason": self.reason, "has_left": self.has_left}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "RankLoss":
        """Return the loss that `to_json` wrote."""
        return cls(str(data["reason"]), bool(data["has_left"]))


@dataclass(slots=True)
class Losses:
    """All bad news that one rank has had. One thread adds to it while others read."""

    rank: int
    hosts: list[str]
    ranks: dict[int, RankLoss] = field(default_factory=dict)
    """The ranks that are gone."""
    faults: list[Fault] = field(default_factory=list)
    coordinator: str = ""
    """Why the coordinator is gone; empty while it is there."""

    @property
    def has_news(self) -> bool:
        """Whether there is any."""
        return bool(self.ranks or self.faults or self.coordinator)

    def describe(self, rank: int) -> str:
        """Return `rank 3 on hostname`."""
        return f"rank {rank} on {self.hosts[rank]}"

    def lose_coordinator(self, reason: str, *, is_silent: bool) -> None:
        """Note that the coordinator is gone; if its host is silent, all ranks of that host are lost too."""
        host = self.hosts[0]
        if is_silent and host != self.hosts[self.rank]:
            for rank in [rank for rank, name in enumerate(self.hosts) if name == host]:
                self.ranks.setdefault(rank, RankLoss(reason))
        self.coordinator = reason

    def failure(
        self, peer: int, members: Collection[int], doing: str, call: UserCall | None
    ) -> WorldError | UserError | None:
        """Return the error for a rank that waits for `peer` in a group, if there is one; see `ControlClient`."""
        for fault in self.faults.copy():
            if fault.concerns(members):
                return fault.to_error()
        for rank, loss in self.ranks.copy().items():
            if rank == peer or (rank in members and rank != self.rank and not loss.has_left):
                return self._rank_error(rank, loss, doing, call)
        return self.coordinator_error(doing, self.coordinator) if self.coordinator else None

    def coordinator_error(self, doing: str, reason: str) -> WorldError:
        """Return the error of a rank that cannot continue without the coordinator."""
        where = f"a process on {self.hosts[0]}"
        return WorldError(f"the coordinator of this job, {where}, was lost in {doing}: {reason}; restart the job")

    def _rank_error(self, rank: int, loss: RankLoss, doing: str, call: UserCall | None) -> PeerLost | DifferentCalls:
        # A rank that ended without an error has done all that the script asked of it: the script is to blame, and to
        # start it again would not help.
        if call and loss.has_left:
            return DifferentCalls(describe_ended(self.rank, rank, call))
        return PeerLost(f"{self.describe(rank)} was lost in {call or doing}: {loss.reason}", rank)
