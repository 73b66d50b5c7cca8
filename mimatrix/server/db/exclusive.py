"""One server per database: a lock in PostgreSQL, and no SQLite where locks do not hold."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Engine, text

from mimatrix.core.errors import UserError

_LOCK_KEY = 0x6D696D61  # "mima"
_NETWORK_TYPES = frozenset(
    {
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "fuse",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
    }
    | {"ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs"}
)
_PATIENCE_S, _PAUSE_S = 3.0, 0.1
_MOUNTS = Path("/proc/self/mountinfo")


@contextmanager
def exclusive_use(engine: Engine) -> Iterator[None]:
    """Hold the database for this server alone. SQLite is protected by the lock file of its directory instead.

    Raises:
        UserError: Another server uses it.
    """
    if engine.dialect.name != "postgresql":
        yield
        return
    # The lock belongs to this connection, which is closed at the end and not given back to the pool.
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.detach()
        deadline_s = time.monotonic() + _PATIENCE_S
        # PostgreSQL may notice only a moment later that the server before was killed.
        while not connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": _LOCK_KEY}):
            if time.monotonic() > deadline_s:
                raise UserError("another server uses this database; stop it, or give another --database")
            time.sleep(_PAUSE_S)
        yield


def check_local(folder: Path, mounts: str | None = None) -> None:
    """Refuse a directory for SQLite on a network file system, where locks and shared memory do not work reliably.

    Raises:
        UserError: The directory is on NFS, SMB, Lustre, FUSE or the like.
    """
    kind = file_system_of(folder, _MOUNTS.read_text() if mounts is None else mounts)
    if kind in _NETWORK_TYPES or kind.startswith("fuse."):
        raise UserError(
            f'"{folder}" is on a network file system ({kind}), which SQLite cannot use safely; give --data a local '
            "directory and --checkpoints the shared one, or use --database postgresql://..."
        )


def file_system_of(folder: Path, mounts: str) -> str:
    """Return the type of the file system that holds a directory, given the text of /proc/self/mountinfo."""
    path, found, kind = os.path.realpath(folder), "", ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        # Special characters are octal in this file; of mounts on the same directory the last one counts.
        mount = before.split()[4].encode().decode("unicode_escape")
        if len(mount) >= len(found) and (path == mount or path.startswith(f"{mount.rstrip('/')}/")):
            found, kind = mount, after.split()[0]
    return kind
