"""What all parts of a running server share."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event

from mimatrix.launch import Launcher
from mimatrix.server.auth.tokens import Authenticator
from mimatrix.server.db.engine import Sessions
from mimatrix.server.jobs.code_archives import CodeArchives
from mimatrix.server.metrics.live_state import Live


@dataclass
class Context:
    """One server: its database, launcher and state in memory."""

    sessions: Sessions
    launcher: Launcher
    code_archives: CodeArchives
    authenticator: Authenticator
    clock: Callable[[], float]
    live: Live = field(default_factory=Live)
    wake: Event = field(default_factory=Event)
    """Set when there is something to decide."""
    controller_turned_at_s: float = field(default_factory=time.monotonic)
    """When the controller completed a turn last; `time.monotonic()`."""


def team_name(job: int, generation: int) -> str:
    """Return the name of a job's team of processes, for the launcher."""
    return f"job-{job}.{generation}"
