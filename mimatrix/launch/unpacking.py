"""Archives of members, unpacked by a child that can be ended and that has no more rights than the members."""

import gzip
import os
import tarfile
import zlib
from pathlib import Path

from mimatrix.launch.accounts import Account
from mimatrix.launch.trees import ENDS, die_with_parent, fork


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
                packed.extractall(".", filter="data")
    except tarfile.FilterError as error:
        return f"{archive} must not be unpacked ({error}); pack a folder that has all it needs inside of it"
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        return f"{archive} cannot be unpacked ({error}); pack the folder again, as .tar.gz"
    return ""


def _enter(folder: Path, account: Account | None) -> None:
    """Make the folder, go there, and become the user, who may not be able to go there by itself."""
    folder.mkdir()
    os.chdir(folder)
    if account:
        os.chown(".", account.uid, account.gid)
        account.become()
    die_with_parent()  # a change of user would undo it, so it comes after
