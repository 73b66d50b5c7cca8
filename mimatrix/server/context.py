"""What all parts of a running server share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event

from mimatrix.launch import Launcher
from mimatrix.server.database import Sessions
from mimatrix.server.live import Live
from mimatrix.server.snapshots import Snapshots
from mimatrix.server.tokens import Doorkeeper


@dataclass(frozen=True)
class Context:
    """One server."""

    sessions: Sessions
    launcher: Launcher
    snapshots: Snapshots
    doorkeeper: Doorkeeper
    clock: Callable[[], float]
    live: Live = field(default_factory=Live)
    wake: Event = field(default_factory=Event)
    """Set when there is something to decide."""


def team_name(job: int, generation: int) -> str:
    """Of a job's processes, for the launcher."""
    return f"job-{job}.{generation}"
