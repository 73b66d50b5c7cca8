"""How a process of a job ended, and why: a value. `ExitCause.describe` renders it where a person reads it."""

import signal as signals
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from mimatrix.core.exit_codes import CANNOT_RUN


class ExitKind(StrEnum):
    """How a process ended."""

    EXITED = "exited"
    """By itself, with `code`."""
    SIGNALED = "signaled"
    """Killed by `signal`."""
    REFUSED = "refused"
    """It could not be started; `detail` is what the operating system said."""
    CANCELLED = "cancelled"
    """It was told to end before it was started."""
    LOST = "lost"
    """Unknown, because its reaper, supervisor or node is gone; `detail` says which."""


class EndedFor(StrEnum):
    """Why the launcher ended a process, if it did."""

    NONE = "none"
    """The process ended by itself."""
    REQUEST = "request"
    """The launcher was told to end the team."""
    PEER = "peer"
    """Rank `because_of` failed."""
    TIMEOUT = "timeout"
    """A time limit was reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitCause:
    """How one process ended, and why."""

    kind: ExitKind
    code: int | None = None
    signal: int | None = None
    ended_for: EndedFor = EndedFor.NONE
    because_of: int | None = None
    """The rank whose failure ended it."""
    detail: str = ""
    """Text for people: which supervisor was lost, which processes were left over."""

    @classmethod
    def from_returncode(cls, returncode: int, *, detail: str = "") -> "ExitCause":
        """Return the cause for an exit code, or for minus the number of a signal, as `subprocess` gives it."""
        if returncode < 0:
            return cls(kind=ExitKind.SIGNALED, signal=-returncode, detail=detail)
        return cls(kind=ExitKind.EXITED, code=returncode, detail=detail)

    @classmethod
    def lost(cls, detail: str = "") -> "ExitCause":
        """Return the cause for a process of which nothing more can be known."""
        return cls(kind=ExitKind.LOST, detail=detail)

    @classmethod
    def refused(cls, detail: str) -> "ExitCause":
        """Return the cause for a process that could not be started."""
        return cls(kind=ExitKind.REFUSED, detail=detail)

    @property
    def is_clean(self) -> bool:
        """Whether the process exited by itself with code 0."""
        return self.kind is ExitKind.EXITED and self.code == 0

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal; None if it is unknown."""
        match self.kind:
            case ExitKind.EXITED:
                return self.code
            case ExitKind.SIGNALED:
                return -(self.signal or 0)
            case ExitKind.REFUSED:
                return CANNOT_RUN
            case ExitKind.CANCELLED:
                return -signals.SIGTERM
            case ExitKind.LOST:
                return None

    def renumber(self, rank_of: Callable[[int], int]) -> "ExitCause":
        """Return the same cause with the rank that it names translated by `rank_of`."""
        return self if self.because_of is None else replace(self, because_of=rank_of(self.because_of))

    def describe(self) -> str:
        """Return what happened as the end of a sentence about the process: `was killed by SIGKILL`."""
        return "".join((self._describe_end(), self._describe_reason(), f"; {self.detail}" if self._has_note else ""))

    def to_json(self) -> dict[str, Any]:
        """Return plain data, without the fields that say nothing."""
        fields = {
            "code": self.code,
            "signal": self.signal,
            "ended_for": None if self.ended_for is EndedFor.NONE else self.ended_for.value,
            "because_of": self.because_of,
            "detail": self.detail or None,
        }
        return {"kind": self.kind.value, **{name: value for name, value in fields.items() if value is not None}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ExitCause":
        """Return the cause that `to_json` wrote.

        Raises:
            ValueError: `data` is something else.
        """
        unknown = data.keys() - {"kind", "code", "signal", "ended_for", "because_of", "detail"}
        numbers = {name: data.get(name) for name in ("code", "signal", "because_of")}
        detail = data.get("detail", "")
        if unknown or not isinstance(detail, str) or not all(map(_is_number_or_none, numbers.values())):
            raise ValueError(f"{dict(data)} does not describe how a process ended")
        ended_for = EndedFor(data.get("ended_for", EndedFor.NONE))
        return cls(kind=ExitKind(data.get("kind", "")), ended_for=ended_for, detail=detail, **numbers)

    @property
    def _has_note(self) -> bool:
        return bool(self.detail) and self.kind in (ExitKind.EXITED, ExitKind.SIGNALED)

    def _describe_end(self) -> str:
        because = f": {self.detail}" if self.detail else ""
        match self.kind:
            case ExitKind.EXITED:
                return f"ended with exit code {self.code}"
            case ExitKind.SIGNALED:
                return f"was killed by {signal_name(self.signal or 0)}"
            case ExitKind.REFUSED:
                return f"could not be started{because}"
            case ExitKind.CANCELLED:
                return "was told to end before it was started"
            case ExitKind.LOST:
                return f"was lost{because}"

    def _describe_reason(self) -> str:
        match self.ended_for:
            case EndedFor.REQUEST if self.kind is not ExitKind.CANCELLED:
                return " when it was told to end"
            case EndedFor.PEER:
                return f" because rank {self.because_of} failed"
            case EndedFor.TIMEOUT:
                return " at its time limit"
            case _:
                return ""


def signal_name(number: int) -> str:
    """Return `SIGTERM` for 15, and `signal 40` for one without a name."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _is_number_or_none(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))
