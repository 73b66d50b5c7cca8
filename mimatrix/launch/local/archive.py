"""Unpack a team's archive in a child process that can be killed and that has no more rights than the members."""

import gzip
import io
import json
import os
import resource
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mimatrix.core.units import format_bytes
from mimatrix.launch.local.users import Account
from mimatrix.launch.start_failure import StartFailure, StartFailureKind, is_transient
from mimatrix.processes.proc import TERMINATION_SIGNALS, die_with_parent, fork

_LONGEST_READ = 1 << 17
"""Contents are copied in small pieces; only the extended header of an entry (names, attributes) is read at once."""
_DETAIL_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """How much an archive may unpack to: a few kilobytes can hold terabytes of zeros."""

    max_bytes: int = 1 << 30
    """Of the files, and of the stream that is decompressed, with its headers."""
    max_files: int = 100_000
    max_memory_bytes: int = 1 << 28
    """What may be allocated meanwhile, for the names of all entries."""


class _UnsafeError(tarfile.TarError):
    """An entry leads out of the directory."""


class _TooLargeError(tarfile.TarError):
    """There are too many bytes or files."""


_UNSAFE: tuple[type[Exception], ...] = (_UnsafeError, getattr(tarfile, "FilterError", _UnsafeError))


def start_unpacking(
    archive: Path, folder: Path, account: Account | None, limits: ArchiveLimits | None = None
) -> tuple[int, int]:
    """Start a child that creates `folder` and unpacks the archive there.

    Returns:
        The child, and a descriptor for `read_failure`: it ends when the child does.
    """
    receiver, sender = os.pipe()

    def act() -> None:
        failure = _unpack(archive, folder, account, limits or ArchiveLimits())
        if failure:
            os.write(sender, json.dumps(failure.to_json()).encode())

    child = fork(act, [sender], TERMINATION_SIGNALS)
    os.close(sender)
    return child, receiver


def read_failure(data: bytes) -> StartFailure | None:
    """Return why the child could not unpack the archive; None if it said nothing."""
    return StartFailure.from_json(json.loads(data)) if data else None


def _unpack(archive: Path, folder: Path, account: Account | None, limits: ArchiveLimits) -> StartFailure | None:
    try:
        with archive.open("rb") as file:
            _enter(folder, account)
            _limit_memory(limits.max_memory_bytes)
            with gzip.open(file) as plain:
                bounded = _Bounded(plain, limits.max_bytes)
                with tarfile.open(mode="r:", fileobj=bounded) as packed:
                    _extract(packed, list(_checked(packed, limits)))
    except MemoryError:
        detail = _too_large_headers(limits)
        return StartFailure(kind=StartFailureKind.ARCHIVE_TOO_LARGE, detail=detail, archive=str(archive))
    except (OSError, EOFError, ValueError, RecursionError, tarfile.TarError, zlib.error) as error:
        detail = str(error)[:_DETAIL_CHARACTERS]
        return StartFailure(kind=_kind(error), detail=detail, archive=str(archive), is_transient=is_transient(error))
    return None


def _kind(error: Exception) -> StartFailureKind:
    if isinstance(error, _UNSAFE):
        return StartFailureKind.ARCHIVE_UNSAFE
    if isinstance(error, _TooLargeError):
        return StartFailureKind.ARCHIVE_TOO_LARGE
    # gzip raises an OSError without a number for what is not an archive.
    is_of_system = isinstance(error, OSError) and error.errno is not None
    return StartFailureKind.UNPACKING if is_of_system else StartFailureKind.ARCHIVE_INVALID


def _too_large_headers(limits: ArchiveLimits) -> str:
    return f"its headers take more than {format_bytes(limits.max_memory_bytes)} of memory"


def _checked(packed: tarfile.TarFile, limits: ArchiveLimits) -> Iterator[tarfile.TarInfo]:
    """Yield the entries, and stop at the first that is too much: its contents are not even decompressed."""
    left, names_left = limits.max_bytes, limits.max_memory_bytes
    for number, member in enumerate(packed, 1):
        left -= max(0, member.size)
        if left < 0:
            raise _TooLargeError(f"it unpacks to more than {format_bytes(limits.max_bytes)}")
        if number > limits.max_files:
            raise _TooLargeError(f"it has more than {limits.max_files} files")
        names_left -= len(member.name) + len(member.linkname)
        if names_left < 0:
            raise _TooLargeError(_too_large_headers(limits))
        # Applied already, and of any size: a global header is repeated for every entry.
        member.pax_headers = {}
        yield member


def _extract(packed: tarfile.TarFile, members: list[tarfile.TarInfo]) -> None:
    """Extract the entries here, and nowhere else."""
    if hasattr(tarfile, "data_filter"):
        packed.extractall(".", members, filter="data")
        return
    # Before Python 3.11.4: only what cannot lead elsewhere, as this user's, without set-user-ID bits.
    for member in members:
        path = Path(member.name)
        if not (member.isfile() or member.isdir()) or path.is_absolute() or ".." in path.parts:
            raise _UnsafeError(f'"{member.name}" is not a plain file inside the directory')
        member.mode, member.uid, member.gid = member.mode & 0o777, os.geteuid(), os.getegid()
        member.uname = member.gname = ""
    packed.extractall(".", members)  # noqa: S202 (checked above)


def _enter(folder: Path, account: Account | None) -> None:
    """Create the directory, change to it, and become the user, who may not be able to reach it by its path."""
    folder.mkdir()
    os.chdir(folder)
    if account:
        os.chown(".", account.uid, account.gid)
        account.become()
    die_with_parent()  # a change of user would undo it, so it comes after


def _limit_memory(max_bytes: int) -> None:
    """Let this process allocate no more than this from now on: one header may be kept many times."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    used = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData:"))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [limit for limit in (used + max_bytes, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))


class _Bounded(io.BufferedIOBase):
    """A stream that is decompressed to a limit, and of which no single read is large, whatever a header asks for."""

    def __init__(self, stream: gzip.GzipFile, max_bytes: int) -> None:
        self._stream, self._max_bytes = stream, max_bytes

    def read(self, size: int | None = -1) -> bytes:
        """Read at most `size` bytes."""
        if size is None or not 0 <= size <= _LONGEST_READ:
            raise _TooLargeError(f"the header of an entry has {size} bytes")
        self._check(self._stream.tell() + size)
        return self._stream.read(size)

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        """Change the position, which decompresses what is skipped."""
        self._check(position if whence == os.SEEK_SET else self._stream.tell() + position)
        return self._stream.seek(position, whence)

    def tell(self) -> int:
        """Return the position."""
        return self._stream.tell()

    def _check(self, position: int) -> None:
        if position > self._max_bytes:
            raise _TooLargeError(f"it unpacks to more than {format_bytes(self._max_bytes)}, with its headers")
