"""What all parts of a running server share."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event

from mimatrix.launch import Launcher
from mimatrix.server.auth.tokens import Authenticator
from mimatrix.server.db.engine import Sessions
from mimatrix.server.db.unreadable import UnreadableRows
from mimatrix.server.jobs.code_archives import CodeArchives
from mimatrix.server.jobs.quotas import Quotas
from mimatrix.server.metrics.live_state import Live


@dataclass(eq=False)
class Context:
    """One server: its database, launcher and state in memory."""

    sessions: Sessions
    launcher: Launcher
    code_archives: CodeArchives
    authenticator: Authenticator
    clock: Callable[[], float]
    """Wall time, for what is stored and shown. It may jump."""
    monotonic: Callable[[], float] = time.monotonic
    """For time limits, grace periods and pauses."""
    quotas: Quotas = field(default_factory=Quotas)
    live: Live = field(default_factory=Live)
    wake: Event = field(default_factory=Event)
    """Set when there is something to decide."""
    unreadable: UnreadableRows = field(default_factory=UnreadableRows)
    controller_turned_at_s: float = field(init=False)
    """When the controller last completed all of its stages, by `monotonic`."""

    def __post_init__(self) -> None:
        self.controller_turned_at_s = self.monotonic()


JobTeam = tuple[int, int]
"""A job and its generation."""


def team_name(job: int, generation: int) -> str:
    """Return the launcher's name for the processes of a job in one generation."""
    return f"job-{job}.{generation}"


def parse_team_name(name: str) -> tuple[int, int] | None:
    """Return job and generation of a team that this server named; None for any other."""
    prefix, dot, generation = name.partition(".")
    job = prefix.removeprefix("job-")
    is_ours = prefix != job and dot and job.isdecimal() and generation.isdecimal()
    return (int(job), int(generation)) if is_ours and job.isascii() and generation.isascii() else None
