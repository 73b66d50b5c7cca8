"""Runs that only measure (`mimatrix profile`): store the profiles, then exit where training would begin.

`MIMATRIX_PROFILE` names the file for the profiles. `MIMATRIX_PROFILE_CLUSTER`, if set, names one for the cluster that
the links between the ranks form. On several hosts all ranks need the same variables; rank 0 writes.
"""

from pathlib import Path

from mimatrix.cluster import Device, write_cluster
from mimatrix.core import environment
from mimatrix.core.errors import UserError
from mimatrix.core.files import write_atomic
from mimatrix.engine.planning.cluster_discovery import discover_cluster
from mimatrix.engine.planning.measure import PrepareContext, measure_ranks
from mimatrix.engine.rank_exchange import gather_or_raise
from mimatrix.planner.device_matching import memory_for_room


class ProfileOnlyExit(SystemExit):
    """Ends the process with exit code 0 from inside `run.prepare`, once the profiles are stored.

    The user's script must not train, and it need not know that it runs under `mimatrix profile`: so this is raised
    through it. It is the only place where `run.prepare` does not return.
    """

    def __init__(self) -> None:
        super().__init__(0)


def requested() -> bool:
    """Return whether this run only measures."""
    return bool(environment.PROFILE.get())


def run_and_exit(context: PrepareContext) -> None:
    """Measure, write the files and exit. A collective.

    Raises:
        ProfileOnlyExit: Always, unless something failed before.
    """
    measurements = measure_ranks(context)
    cluster_file = environment.PROFILE_CLUSTER.get()
    # A plan leaves some memory free, which is already subtracted from the measured room.
    devices = [Device(profile.device, memory_for_room(profile.room_bytes)) for profile in measurements.profiles]
    cluster = write_cluster(discover_cluster(context, devices)) if cluster_file else ""
    _write_on_rank0(context, Path(environment.PROFILE.get()), measurements.to_text())
    if cluster_file:
        _write_on_rank0(context, Path(cluster_file), cluster)
    raise ProfileOnlyExit


def _write_on_rank0(context: PrepareContext, file: Path, text: str) -> None:
    gather_or_raise(context.exchange, lambda: _write(file, text) if context.rank == 0 else None)


def _write(file: Path, text: str) -> None:
    try:
        write_atomic(file, text)
    except OSError as error:
        raise UserError(f'"{file}" cannot be written ({error.strerror}); choose another file') from None
