"""What all parts of a running server share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event

from mimatrix.launch import Launcher
from mimatrix.server.auth.tokens import Authenticator
from mimatrix.server.db.engine import Sessions
from mimatrix.server.jobs.code_archives import CodeArchives
from mimatrix.server.metrics.live_state import Live


@dataclass(frozen=True)
class Context:
    """One server."""

    sessions: Sessions
    launcher: Launcher
    code_archives: CodeArchives
    authenticator: Authenticator
    clock: Callable[[], float]
    live: Live = field(default_factory=Live)
    wake: Event = field(default_factory=Event)
    """Set when there is something to decide."""


def team_name(job: int, generation: int) -> str:
    """Of a job's processes, for the launcher."""
    return f"job-{job}.{generation}"
