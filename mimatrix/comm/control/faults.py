"""What one rank tells all others about a call that cannot be finished."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from mimatrix.core.errors import DifferentCalls, MismatchError, PeerLost, WorldError


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One sentence, and for whom it is an error."""

    text: str
    ranks: tuple[int, ...]
    """The ranks that it concerns: groups that have all of them. Empty: all groups."""
    failed: int | None = None
    """The rank that failed, if it was one."""
    is_users: bool = False
    """Whether the script is to blame."""

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return {"text": self.text, "ranks": self.ranks, "failed": self.failed, "is_users": self.is_users}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> "Fault":
        """Return the fault that a message carries.

        Raises:
            WorldError: A field is missing or of the wrong type.
        """
        match body:
            case {
                "text": str(text),
                "ranks": list(ranks),
                "failed": None | int() as failed,
                "is_users": bool(is_users),
            } if all(type(rank) is int for rank in ranks):
                return cls(text=text, ranks=tuple(ranks), failed=failed, is_users=is_users)
        raise WorldError("a fault is corrupt: its fields are not those of a fault; check who sent it")

    def concerns(self, members: Collection[int]) -> bool:
        """Return whether it is an error for a group with these members."""
        return set(self.ranks) <= set(members)

    def to_error(self) -> WorldError | DifferentCalls:
        """Return the error to raise."""
        if self.is_users:
            return DifferentCalls(self.text)
        if self.failed is not None:
            return PeerLost(self.text, self.failed)
        return MismatchError(self.text) if self.ranks else WorldError(self.text)
