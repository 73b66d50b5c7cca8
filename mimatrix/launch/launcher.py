"""What starts processes on machines: one small protocol, whoever the machines belong to.

A *team* is the processes of one job in one generation. A launcher that is made anew knows the teams that an earlier
one of the same place started: they go on without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from mimatrix.launch.exit_causes import ExitCause


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device of a node."""

    kind: str
    """For people, and for what jobs ask for: `NVIDIA A40`, `cpu`."""
    memory_bytes: int
    variables: Mapping[str, str] = field(default_factory=dict)
    """What a process needs in its environment to see this one and no other."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One machine that answers."""

    name: str
    address: str
    """By which the other nodes reach it."""
    devices: tuple[DeviceFacts, ...]
    near: str = ""
    """Nodes with the same word are close to one another."""


@dataclass(frozen=True, slots=True)
class Member:
    """One process: where it runs, and on which of the node's devices."""

    node: str
    device: int
    environment: Mapping[str, str] = field(default_factory=dict)
    """Its own, beside the team's."""


@dataclass(frozen=True, slots=True)
class Team:
    """What to start. Members are in the order of their ranks."""

    name: str
    """Of letters, digits, `.`, `_` and `-`; a job and its generation."""
    words: tuple[str, ...]
    members: tuple[Member, ...]
    archive: Path
    """A .tar.gz of the folder to run in; every team gets a copy of its own on each node."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """All of it, with what a process needs to be run at all: nothing else is passed on."""
    grace_s: float = 10.0
    """Between being told to end and being killed."""
    run_as: str = ""
    """The user; the launcher's own if empty."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Ranks that end together when one of them fails; without, all do."""
    restarts: int = 0
    """How many times, in all, a group that was lost is restarted while others run, once they have met."""
    others: bool = False
    """Whether there are others of the same team on other nodes."""


class Phase(StrEnum):
    """Of one member."""

    STARTING = "starting"
    RUNNING = "running"
    EXITED = "exited"
    LOST = "lost"
    """Nobody knows how it ended: its node or its keeper is gone."""


@dataclass(frozen=True, slots=True)
class MemberState:
    """What is known of one process."""

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
    """What is known of a team. It has ended when all its members have."""

    members: tuple[MemberState, ...]
    first_failure: int | None = None
    """The rank that failed first; the others of its group were ended because of it."""
    returning: bool = False
    """Whether some of them are to be started again in a moment."""

    @property
    def has_ended(self) -> bool:
        """Whether no process of it is left, and none will be."""
        return not self.returning and all(member.phase in (Phase.EXITED, Phase.LOST) for member in self.members)


@dataclass(frozen=True, slots=True)
class LogPart:
    """A piece of a member's output, and where to go on."""

    data: bytes
    next_offset: int
    """Counted from the first byte that it ever wrote, those that were dropped since included."""


class Launcher(Protocol):
    """Starts teams and tells what became of them. Every call returns within seconds, or raises a `WorldError`."""

    def nodes(self) -> tuple[NodeFacts, ...]:
        """Those that answer now."""

    def start(self, team: Team) -> None:
        """Start all members, or none. A team of this name that was started already is left as it is."""

    def states(self) -> Mapping[str, TeamState]:
        """All teams that are known by name, also those that an earlier launcher started; until they are forgotten."""

    def end(self, team: str, *, now: bool = False) -> None:
        """Tell all members to end, and kill what is left after the grace; `now`: kill at once. Whole process trees."""

    def read_log(self, team: str, rank: int, offset: int, most: int = 65_536) -> LogPart:
        """Output of a member from `offset` on, below 0 from its end; from the oldest where that was dropped already."""

    def forget(self, team: str) -> None:
        """Remove what is kept of a team that has ended."""

    def close(self) -> None:
        """Let go of what this launcher holds; teams go on."""
