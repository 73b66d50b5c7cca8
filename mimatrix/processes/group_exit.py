"""How a group of processes that ran together ended: a value that `describe` renders."""

import signal as signals
from dataclasses import dataclass, field
from enum import StrEnum

from mimatrix.core.exit_codes import PEER_LOST, SIGNALED, TIMED_OUT
from mimatrix.processes.signals import signal_name


class GroupExitKind(StrEnum):
    """How a group of processes ended."""

    CLEAN = "clean"
    """All processes exited with 0, or all of one subgroup; `lost` has the others."""
    FAILED = "failed"
    """The process `label` failed, with `code` or by `signal`, and the others were ended."""
    INTERRUPTED = "interrupted"
    """The process that ran the group got `signal`."""
    TIMED_OUT = "timed_out"
    """The time limit of `timeout_s` was reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupExit:
    """How a group ended: which process failed first, and how."""

    kind: GroupExitKind = GroupExitKind.CLEAN
    code: int = 0
    """The exit code to pass on, as a shell does: 128 plus the signal for one that was killed."""
    label: str = ""
    signal: int | None = None
    timeout_s: float | None = None
    last_line: str = field(default="", compare=False)
    """The last line that the process wrote to standard error."""
    lost: tuple["GroupExit", ...] = ()
    """Subgroups that failed while others finished."""

    @classmethod
    def failed(cls, label: str, returncode: int, last_line: str = "") -> "GroupExit":
        """Return the exit for a process that failed, with its code or minus its signal."""
        signal = -returncode if returncode < 0 else None
        code = returncode if signal is None else SIGNALED + signal
        return cls(kind=GroupExitKind.FAILED, code=code, label=label, signal=signal, last_line=last_line)

    @classmethod
    def interrupted(cls, signal: int) -> "GroupExit":
        """Return the exit for a group that was ended because we got a signal."""
        return cls(kind=GroupExitKind.INTERRUPTED, code=SIGNALED + signal, signal=signal)

    @classmethod
    def timed_out(cls, timeout_s: float) -> "GroupExit":
        """Return the exit for a group that was ended at its time limit."""
        return cls(kind=GroupExitKind.TIMED_OUT, code=TIMED_OUT, timeout_s=timeout_s)

    def is_caused_by(self, later: "GroupExit") -> bool:
        """Whether this process stopped only because it lost the peer that `later` tells of."""
        ended_by_us = later.signal in (signals.SIGTERM, signals.SIGKILL)
        return self.code == PEER_LOST and later.code != PEER_LOST and not ended_by_us

    def describe(self) -> str:
        """Return one sentence; nothing if all processes exited with 0."""
        match self.kind:
            case GroupExitKind.CLEAN:
                return f"{', '.join(one.describe() for one in self.lost)}; the others finished" if self.lost else ""
            case GroupExitKind.FAILED:
                return f"[{self.label}] {self.describe_end()}"
            case GroupExitKind.INTERRUPTED:
                return f"ended by {signal_name(self.signal or 0)}"
            case GroupExitKind.TIMED_OUT:
                return f"not done after {self.timeout_s:g} s"

    def describe_end(self) -> str:
        """Return how the process that failed ended, as the end of a sentence about it."""
        return (
            f"ended with exit code {self.code}" if self.signal is None else f"was killed by {signal_name(self.signal)}"
        )
