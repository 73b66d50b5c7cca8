"""How much one user may have in the server, so that one user does not fill the queue or the disk for all."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Limits per user. Admins have none."""

    queued_jobs: int = 1000
    """Jobs that wait."""
    code_archive_bytes: int = 20 << 30
    """Uploaded code archives that are still kept."""
