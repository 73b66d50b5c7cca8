"""Why a team could not be started: a value that tells whether another try may help."""

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mimatrix.core.errors import UserError, WorldError

_TRANSIENT = frozenset(
    {
        *(errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT),
        *(errno.EMFILE, errno.ENFILE),
        *(errno.ENOMEM, errno.ENOBUFS),
        *(errno.ENOSPC, errno.EDQUOT),
    }
)


class StartError(WorldError):
    """A team could not be started, and nothing of it is left.

    Attributes:
        failure: Why, if the members are to blame and not the machines.
        is_transient: Whether the same team may well start a little later: no memory, descriptor, process or disk space
            was left, or a node did not answer.
    """

    def __init__(self, message: str, *, is_transient: bool, failure: "StartFailure | None" = None) -> None:
        super().__init__(message)
        self.is_transient = is_transient
        self.failure = failure


class TeamRefusedError(UserError):
    """A team cannot be started as it is, and nothing of it is left."""

    def __init__(self, failure: "StartFailure") -> None:
        super().__init__(failure.describe())
        self.failure = failure


class StartFailureKind(StrEnum):
    """What could not be done."""

    COMMAND = "command"
    """Rank `rank` could not be started; `detail` is what the operating system said."""
    ARCHIVE_INVALID = "archive_invalid"
    """The archive cannot be read."""
    ARCHIVE_UNSAFE = "archive_unsafe"
    """The archive has an entry that leads out of the directory."""
    ARCHIVE_TOO_LARGE = "archive_too_large"
    """The archive unpacks to more bytes or files than are allowed."""
    UNPACKING = "unpacking"
    """The archive could not be written to the disk, or not in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailure:
    """Why none of a team's members runs."""

    kind: StartFailureKind
    detail: str
    rank: int | None = None
    archive: str = ""
    is_transient: bool = False
    """Whether the same team may well start a little later."""

    def describe(self) -> str:
        """Return one sentence, with the fix if there is one."""
        match self.kind:
            case StartFailureKind.COMMAND:
                return f"rank {self.rank} cannot be started: {self.detail}"
            case StartFailureKind.ARCHIVE_INVALID:
                return f"{self.archive} cannot be unpacked ({self.detail}); pack the directory again, as .tar.gz"
            case StartFailureKind.ARCHIVE_UNSAFE:
                return f"{self.archive} must not be unpacked ({self.detail}); pack only files inside the directory"
            case StartFailureKind.ARCHIVE_TOO_LARGE:
                return f"{self.archive} is too large ({self.detail}); pack only code, and read data from a shared path"
            case StartFailureKind.UNPACKING:
                return f"{self.archive} was not unpacked ({self.detail}); start the team again"

    def to_error(self) -> "StartError | TeamRefusedError":
        """Return the error to raise for it."""
        if self.is_transient or self.kind is StartFailureKind.UNPACKING:
            return StartError(self.describe(), is_transient=self.is_transient, failure=self)
        return TeamRefusedError(self)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "kind": self.kind.value,
            "detail": self.detail,
            "rank": self.rank,
            "archive": self.archive,
            "is_transient": self.is_transient,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "StartFailure":
        """Return the failure that `to_json` wrote."""
        return cls(
            kind=StartFailureKind(data["kind"]),
            detail=str(data["detail"]),
            rank=None if data["rank"] is None else int(data["rank"]),
            archive=str(data["archive"]),
            is_transient=bool(data["is_transient"]),
        )


def is_transient(error: BaseException) -> bool:
    """Return whether what failed may well work a little later: memory, descriptors, processes or disk ran short."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _TRANSIENT)
