"""Which ranks have reached which point of which group. No sockets, and no clock.

A rank says who the members of a group are when it first arrives there, and not again: between many ranks the list is
most of a message, and it would be parsed in every round.
"""

from dataclasses import dataclass, field
from typing import Any

from mimatrix.core.errors import WorldError

_MAX_NAME_CHARACTERS = 400
_MAX_WAITING = 1 << 16
"""Points that some, and not all, members have reached: far more than ranks can be ahead of each other."""

_Point = tuple[str, tuple[int, ...], int]
"""A group's name, its members, and a ticket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankArrival:
    """That a rank has reached a ticket of a group."""

    group: str
    ticket: int
    members: tuple[int, ...] = ()
    """Empty if they are those of the rank's last arrival in the group."""
    payload: Any = None

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> "RankArrival":
        """Return the arrival that a message carries.

        Raises:
            WorldError: A field is missing, of the wrong type, or too long.
        """
        match body:
            case {"group": str(group), "ticket": int(ticket), "members": list() | None as members} if (
                len(group) <= _MAX_NAME_CHARACTERS
                and all(type(rank) is int and rank >= 0 for rank in members or ())
                and len(set(members or ())) == len(members or ())
            ):
                return cls(group=group, ticket=ticket, members=tuple(members or ()), payload=body.get("payload"))
        raise WorldError("an arrival is corrupt: its fields are not those of an arrival; check who sent it")


@dataclass(slots=True)
class Synchronisation:
    """The points that some members have reached and others have not."""

    _members: dict[tuple[int, str], tuple[int, ...]] = field(default_factory=dict)
    """By rank and group."""
    _arrived: dict[_Point, dict[int, Any]] = field(default_factory=dict)
    """The payloads of the members that have reached a point."""

    def arrive(self, rank: int, arrival: RankArrival) -> dict[int, Any] | None:
        """Take an arrival; return the payloads of all members, in the group's order, if it is the last one.

        Raises:
            WorldError: The rank is not one of the members, has not said who they are, or arrives a second time.
        """
        members = self._members_of(rank, arrival)
        point = arrival.group, members, arrival.ticket
        arrived = self._arrived.setdefault(point, {})
        if rank in arrived or len(self._arrived) > _MAX_WAITING:
            raise WorldError(f"rank {rank} arrives twice, or at too many points; check its version")
        arrived[rank] = arrival.payload
        if len(arrived) < len(members):
            return None
        del self._arrived[point]
        return {member: arrived[member] for member in members}

    def find_missing(self, group: str, ticket: int, default: int | None) -> int | None:
        """Return the first member that has not reached a ticket; `default` if no rank waits there."""
        for (name, members, number), arrived in self._arrived.items():
            if (name, number) == (group, ticket):
                return next((rank for rank in members if rank not in arrived), default)
        return default

    def forget(self, rank: int) -> None:
        """Forget which groups a rank that is gone has named; it has still reached what it has reached."""
        for key in [key for key in self._members if key[0] == rank]:
            del self._members[key]

    def _members_of(self, rank: int, arrival: RankArrival) -> tuple[int, ...]:
        if arrival.members:
            self._members[rank, arrival.group] = arrival.members
        members = self._members.get((rank, arrival.group), ())
        if rank not in members:
            raise WorldError(f"rank {rank} arrives in a group without being a member; check its version")
        return members
