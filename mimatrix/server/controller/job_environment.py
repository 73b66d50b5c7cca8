"""What jobs are told and how they are run, the same for all jobs of a server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mimatrix.scheduler import Policy


@dataclass(frozen=True, kw_only=True)
class JobEnvironment:
    """How a server runs jobs."""

    address: str
    """Of this server, for workers."""
    command: tuple[str, ...]
    """What runs a script; the script and its arguments follow."""
    variables: Mapping[str, str]
    run_as: str = ""
    """The user of the processes; the server's own if empty."""
    checkpoints: str = ""
    """The directory in which every job has one for its checkpoints; all nodes must see it."""
    policy: Policy = field(default_factory=Policy)

    def checkpoints_of(self, job: int) -> Path | None:
        """Return the directory for the checkpoints of a job, if checkpoints are kept."""
        return Path(self.checkpoints) / f"job-{job}" if self.checkpoints else None

    def rendezvous_of(self, job: int, generation: int) -> Path | None:
        """Return the file through which restarted groups find the others, next to the checkpoints."""
        folder = self.checkpoints_of(job)
        return folder / f".meeting-{generation}" if folder else None
