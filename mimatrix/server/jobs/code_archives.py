"""Directories of scripts as they were when their jobs were submitted: archives, named by their content."""

import hashlib
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

from mimatrix.api.models import MAX_CODE_ARCHIVE_BYTES
from mimatrix.server.errors import ApiError

_DIGEST = re.compile(r"[0-9a-f]{64}")


class CodeArchives:
    """A directory of code archives."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, digest: str) -> Path | None:
        """Return the file of an archive, if there is one."""
        if not _DIGEST.fullmatch(digest):
            raise ApiError(422, "a code archive is named by the SHA-256 of its archive, 64 digits from 0 to f")
        path = self._folder / f"{digest}.tar.gz"
        return path if path.is_file() else None

    def size(self, digest: str) -> int:
        """Return the bytes of an archive; 0 if there is none."""
        path = self.path(digest)
        return path.stat().st_size if path else 0

    def delete(self, digest: str) -> None:
        """Delete an archive, if there is one."""
        path = self.path(digest)
        if path:
            path.unlink(missing_ok=True)

    def delete_partial(self, before_s: float) -> None:
        """Delete uploads that were cut off, and whose files did not change since a time of the file system."""
        for path in self._folder.glob("*.partial"):
            with suppress(OSError):
                if path.stat().st_mtime < before_s:
                    path.unlink()

    async def store(self, digest: str, chunks: AsyncIterator[bytes]) -> None:
        """Store an archive, if it is what its name says and not too large.

        Raises:
            ApiError: It is something else, or too large.
        """
        if self.path(digest):
            async for _ in chunks:
                pass
            return
        partial = self._folder / f"{secrets.token_hex(8)}.partial"
        try:
            found = await _written(partial, chunks)
            if found != digest:
                raise ApiError(422, "the archive is not what its name says; upload it again")
            partial.replace(self._folder / f"{digest}.tar.gz")
        finally:
            partial.unlink(missing_ok=True)


async def _written(path: Path, chunks: AsyncIterator[bytes]) -> str:
    size, seen = 0, hashlib.sha256()
    with path.open("wb") as file:
        async for chunk in chunks:
            size += len(chunk)
            if size > MAX_CODE_ARCHIVE_BYTES:
                most = MAX_CODE_ARCHIVE_BYTES >> 20
                raise ApiError(
                    413, f"the archive is larger than {most} MiB; leave data out with a .mimatrixignore file"
                )
            seen.update(chunk)
            file.write(chunk)
    return seen.hexdigest()
