"""Start processes on machines: one small protocol for all kinds of clusters.

A *team* is the processes of one job in one generation. A new launcher knows the teams that an earlier one of the same
folder started: they keep running without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from mimatrix.launch.devices import NodeInfo
from mimatrix.launch.exit_causes import ExitCause
from mimatrix.launch.start_failure import StartFailure


@dataclass(frozen=True, slots=True)
class Member:
    """One process of a team: where it runs, and on which of the node's devices."""

    node: str
    device: int
    environment: Mapping[str, str] = field(default_factory=dict)
    """Its own, in addition to the team's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """The processes to start. Members are in the order of their ranks."""

    name: str
    """Letters, digits, `.`, `_` and `-`; usually a job and its generation."""
    command: tuple[str, ...]
    members: tuple[Member, ...]
    archive: Path
    """A .tar.gz of the directory to run in; every team gets a copy of its own on each node."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The whole environment: nothing else is passed on. A token in it reaches the processes through a pipe instead."""
    grace_s: float = 10.0
    """Time between SIGTERM and SIGKILL."""
    run_as: str = ""
    """The user to run as; the launcher's own if empty."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Ranks that end together when one of them fails; if empty, all do."""
    restarts: int = 0
    """How many times, in total, a lost group is restarted while others run."""
    restart_after: str = ""
    """Path of a file: a lost group is restarted only if it exists. If empty, no group is."""
    has_remote_members: bool = False
    """Whether other nodes run members of the same team."""


class Phase(StrEnum):
    """What one member is doing."""

    STARTING = "starting"
    RUNNING = "running"
    EXITED = "exited"
    LOST = "lost"
    """How it ended is unknown: its node or its supervisor is gone."""


@dataclass(frozen=True, slots=True)
class MemberState:
    """What is known about one process."""

    phase: Phase
    cause: ExitCause | None = None
    """How it ended; after a restart, how it ended before that."""
    restarts: int = 0
    """How often it was restarted."""

    @property
    def code(self) -> int | None:
        """The exit code, or minus the signal that killed it; None while it runs, and if it is unknown."""
        has_ended = self.phase in (Phase.EXITED, Phase.LOST)
        return self.cause.returncode if self.cause and has_ended else None


@dataclass(frozen=True, slots=True)
class TeamState:
    """What is known about a team. It has ended when all its members have."""

    members: tuple[MemberState, ...]
    first_failure: int | None = None
    """The rank that failed first; the others of its group were ended because of it."""
    is_restarting: bool = False
    """Whether some members are about to be restarted."""
    start_failure: StartFailure | None = None
    """Why no member was started, if none was."""
    unreadable: str = ""
    """Why nothing is known about the team, which may run: another version of MiMatrix wrote its files."""

    @property
    def has_ended(self) -> bool:
        """Whether no process of it is left, and none will be."""
        if self.is_restarting or self.unreadable:
            return False
        return all(member.phase in (Phase.EXITED, Phase.LOST) for member in self.members)


@dataclass(frozen=True, slots=True)
class LogPart:
    """A piece of a member's output, and where the next one begins."""

    data: bytes
    next_offset: int
    """Counted from the first byte that it ever wrote, including those that were dropped since."""


class Launcher(Protocol):
    """Starts teams and reports what became of them. Every call returns within seconds, or raises a `WorldError`.

    Any thread may call it; a call that takes long (`start` unpacks an archive) holds up no other.
    """

    def nodes(self) -> tuple[NodeInfo, ...]:
        """Return the nodes that answer now."""

    def start(self, team: Team) -> None:
        """Start all members, or none. A team of this name that was started already is left as it is.

        Raises:
            UserError: The team cannot be started as it is.
            StartError: The machines could not start it.
        """

    def states(self) -> Mapping[str, TeamState]:
        """Return all teams by name, also those that an earlier launcher started, until they are forgotten."""

    def end(self, team: str, *, now: bool = False) -> None:
        """Send SIGTERM to all processes of a team, and SIGKILL after the grace period; `now`: SIGKILL at once."""

    def read_log(self, team: str, rank: int, offset: int, most: int = 65_536) -> LogPart:
        """Return output of a member from `offset` on, below 0 from its end; from the oldest byte that is kept."""

    def forget(self, team: str) -> None:
        """Remove what is kept of a team that has ended."""

    def close(self) -> None:
        """Release what this launcher holds; teams keep running."""
