"""Where measurements are kept from job to job."""

import os
from pathlib import Path

from mimatrix.core import environment


def cache_folder(kind: str) -> Path:
    """Return the directory for one kind of measurements, such as `tuner`; it may not exist yet."""
    base = environment.CACHE.get() or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "mimatrix" / kind
