"""Where only measurements are wanted (`mimatrix profile`): they are stored, and the script ends where it would train.

`MIMATRIX_PROFILE` names the file for the curves. `MIMATRIX_PROFILE_CLUSTER`, if it is there, one for the cluster that
the links between the ranks make up. On several machines all ranks need the same variables; rank 0 writes.
"""

import os
from pathlib import Path

from mimatrix.cluster import Device, write_cluster
from mimatrix.core.errors import UserError
from mimatrix.engine.planning.cluster_discovery import measured_cluster
from mimatrix.engine.planning.measure import PrepareContext, survey, together
from mimatrix.planner.matching import memory_with


def is_asked() -> bool:
    """Whether this run is one that only measures."""
    return bool(os.environ.get("MIMATRIX_PROFILE"))


def store_and_end(ground: PrepareContext) -> None:
    """Measure, write down and end well. A collective."""
    found = survey(ground)
    cluster = os.environ.get("MIMATRIX_PROFILE_CLUSTER")
    # Of memory a plan leaves some free, which is taken off a measured room already.
    devices = [Device(profile.device, memory_with(profile.room_bytes)) for profile in found.profiles]
    text = write_cluster(measured_cluster(ground, devices)) if cluster else ""
    together(ground, lambda: _write(found.to_text(), Path(os.environ["MIMATRIX_PROFILE"]), ground.rank))
    if cluster:
        together(ground, lambda: _write(text, Path(cluster), ground.rank))
    raise SystemExit(0)


def _write(text: str, file: Path, rank: int) -> None:
    if rank:
        return
    try:
        partial = file.with_name(file.name + ".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise UserError(f'"{file}" cannot be written ({error.strerror}); choose another file') from None
