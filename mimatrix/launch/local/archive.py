"""Archives of members, unpacked by a child that can be ended and that has no more rights than the members."""

import gzip
import os
import tarfile
import zlib
from pathlib import Path

from mimatrix.launch.local.users import Account
from mimatrix.processes.proc import ENDS, die_with_parent, fork


class _StrayError(tarfile.TarError):
    """Something in the archive leads out of the folder."""


_REFUSED: tuple[type[Exception], ...] = (_StrayError, getattr(tarfile, "FilterError", _StrayError))


def start_unpacking(archive: Path, folder: Path, account: Account | None) -> tuple[int, int]:
    """Make `folder` and fill it: gives the child that does it, and where it says why it cannot, or nothing."""
    hears, says = os.pipe()

    def act() -> None:
        os.write(says, _unpack(archive, folder, account).encode(errors="replace")[:4096])

    child = fork(act, [says], ENDS)
    os.close(says)
    return child, hears


def _unpack(archive: Path, folder: Path, account: Account | None) -> str:
    """Why it cannot be done, in one sentence; nothing when it is done."""
    try:
        with archive.open("rb") as file:
            _enter(folder, account)
            with gzip.open(file) as plain, tarfile.open(fileobj=plain, mode="r:") as packed:
                _extract(packed)
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        if isinstance(error, _REFUSED):
            return f"{archive} must not be unpacked ({error}); pack a folder that has all it needs inside of it"
        return f"{archive} cannot be unpacked ({error}); pack the folder again, as .tar.gz"
    return ""


def _extract(packed: tarfile.TarFile) -> None:
    """Here, and nowhere else."""
    if hasattr(tarfile, "data_filter"):
        packed.extractall(".", filter="data")
        return
    # Before Python 3.11.4: only what cannot lead elsewhere, as this user's, and with nobody's rights.
    for member in packed.getmembers():
        path = Path(member.name)
        if not (member.isfile() or member.isdir()) or path.is_absolute() or ".." in path.parts:
            raise _StrayError(f'"{member.name}" is no plain file inside of the folder')
        member.mode, member.uid, member.gid = member.mode & 0o777, os.geteuid(), os.getegid()
        member.uname = member.gname = ""
    packed.extractall(".")  # noqa: S202 (checked above)


def _enter(folder: Path, account: Account | None) -> None:
    """Make the folder, go there, and become the user, who may not be able to go there by itself."""
    folder.mkdir()
    os.chdir(folder)
    if account:
        os.chown(".", account.uid, account.gid)
        account.become()
    die_with_parent()  # a change of user would undo it, so it comes after
