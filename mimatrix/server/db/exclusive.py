"""One server per database: a lock in PostgreSQL or on the file of SQLite, and no SQLite where locks do not hold."""

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from mimatrix.core.errors import UserError, WorldError

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
_TAKE = text("SELECT pg_try_advisory_lock(:key)")
_SELF = text("SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()")
# A key of 64 bits is shown as two of 32, of which the first is 0 here.
_HELD = text(
    "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid = pg_backend_pid() "
    "AND classid::bigint = 0 AND objid::bigint = :key AND objsubid = 1"
)
_END = text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = :pid AND backend_start = :start")
_KEY = {"key": _LOCK_KEY}


class DatabaseTakenError(WorldError):
    """Another server took the database while this one had lost its connection."""


@contextmanager
def exclusive_file(address: str) -> Iterator[None]:
    """Hold the file of a SQLite database for this server alone; nothing is done for a database of another kind.

    It must surround every use of the file in this process: to close a descriptor of it ends the locks of SQLite.

    Raises:
        UserError: Another server uses the file, or it is on a network file system, or cannot be opened.
    """
    file = _sqlite_file(address)
    if file is None:
        yield
        return
    check_local(file, fix="give --database a local file")
    try:
        # The file itself: links to it are the same database. Others must not open it, since they could hold the lock.
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UserError(f'the database "{file}" cannot be opened ({error.strerror}); give another --database') from None
    try:
        with suppress(PermissionError):  # it is another user's, who chose who may open it
            os.fchmod(handle, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f'another server uses the database "{file}"; stop it, or give another one') from None
        yield
    finally:
        os.close(handle)


@contextmanager
def exclusive_use(engine: Engine) -> Iterator[Callable[[], None]]:
    """Hold a PostgreSQL database for this server alone; the file of SQLite is held by `exclusive_file`.

    Yields:
        A function that checks that the database is still ours, for one thread at a time. It takes the lock again if
        the connection was lost, and raises `DatabaseTakenError` if another server has it, or a `WorldError` while the
        database does not answer.

    Raises:
        UserError: Another server uses it.
    """
    if engine.dialect.name != "postgresql":
        yield lambda: None
        return
    lock = _AdvisoryLock(engine)
    try:
        if not lock.take():
            raise UserError("another server uses this database; stop it, or give another --database")
        yield lock.check
    finally:
        lock.release()


class _AdvisoryLock:
    """A lock that belongs to one connection, which is kept out of the pool and used for nothing else."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None
        self._last_backend: dict[str, Any] = {}
        """The process of PostgreSQL that serves the connection with the lock."""

    def take(self) -> bool:
        """Connect and take the lock; return False if another server has it."""
        connection = self._engine.connect()
        try:
            connection.execution_options(isolation_level="AUTOCOMMIT")
            connection.detach()
            if self._last_backend:
                # PostgreSQL may not have noticed yet that our former connection is gone, and keep its lock.
                connection.execute(_END, self._last_backend)
            if not _wait_for_lock(connection):
                connection.close()
                return False
            pid, start = connection.execute(_SELF).one()
        except BaseException:
            with suppress(Exception):
                connection.close()
            raise
        self._last_backend = {"pid": pid, "start": start}
        self._connection = connection
        return True

    def check(self) -> None:
        """Return if the lock is held, by the same connection or by another one that was made just now."""
        if self._is_held():
            return
        self.release()
        try:
            is_taken = self.take()
        except Exception as error:  # noqa: BLE001 (the driver has errors of its own)
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise WorldError(f"the database does not answer, so it may be another server's ({reason})") from None
        if not is_taken:
            raise DatabaseTakenError(
                "this server lost its connection to the database, and another server uses it now; stop one of them"
            )

    def release(self) -> None:
        """Close the connection, and with it the lock."""
        connection, self._connection = self._connection, None
        if connection:
            with suppress(Exception):
                connection.close()

    def _is_held(self) -> bool:
        try:
            return self._connection is not None and bool(self._connection.scalar(_HELD, _KEY))
        except Exception:  # noqa: BLE001 (the connection is lost, whatever the driver says about it)
            return False


def _wait_for_lock(connection: Connection) -> bool:
    """Try for a moment: PostgreSQL may notice only then that the server before was killed."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while not connection.scalar(_TAKE, _KEY):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_PAUSE_S)
    return True


def check_local(
    path: Path,
    mounts: str | None = None,
    *,
    fix: str = "give --data a local directory and --checkpoints the shared one",
) -> None:
    """Refuse a place for SQLite on a network file system, where locks and shared memory do not work reliably.

    Raises:
        UserError: The place is on NFS, SMB, Lustre, FUSE or the like.
    """
    kind = file_system_of(path, os.fsdecode(_MOUNTS.read_bytes()) if mounts is None else mounts)
    if kind in _NETWORK_TYPES or kind.startswith("fuse."):
        raise UserError(
            f'"{path}" is on a network file system ({kind}), which SQLite cannot use safely; {fix}, or use '
            "--database postgresql://..."
        )


def file_system_of(path: Path, mounts: str) -> str:
    """Return the type of the file system that holds a path, given the text of /proc/self/mountinfo."""
    place, found, kind = os.path.realpath(path), "", ""
    # Only this: other characters that end lines or words for Python are parts of names.
    for line in mounts.split("\n"):
        before, _, after = line.partition(" - ")
        if not after:
            continue
        # Spaces, tabs, newlines and backslashes are octal in this file, and nothing else is.
        mount = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), before.split(" ")[4])
        # Of mounts on the same directory the last one counts.
        if len(mount) >= len(found) and (place == mount or place.startswith(f"{mount.rstrip('/')}/")):
            found, kind = mount, after.split(" ")[0]
    return kind


def _sqlite_file(address: str) -> Path | None:
    """Return the file of a SQLite database; None for another kind, and for an invalid address."""
    try:
        url = make_url(address)
    except ArgumentError:
        return None
    if url.get_backend_name() != "sqlite":
        return None
    # Without a name it is in memory; parameters may disable its locks.
    if url.query or not url.database or url.database == ":memory:":
        raise UserError(f'"{address}" is not a file; write sqlite:////directory/mimatrix.db without parameters')
    return Path(os.path.realpath(url.database))
