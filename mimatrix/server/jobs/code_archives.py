"""Code archives: directories of scripts as they were submitted, named by the SHA-256 of the archive."""

import hashlib
import logging
import os
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from fastapi.concurrency import run_in_threadpool

from mimatrix.api.models import MAX_CODE_ARCHIVE_BYTES
from mimatrix.server.errors import ApiError

_DIGEST = re.compile(r"[0-9a-f]{64}")
_PART_BYTES = 1 << 20
logger = logging.getLogger(__name__)


class CodeArchives:
    """The stored code archives, in a directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._verified: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)
        for partial in folder.glob("*.partial"):
            partial.unlink(missing_ok=True)  # of an upload that was cut off with an earlier server

    def path(self, digest: str) -> Path | None:
        """Return the path of an archive; None if it is not stored, or damaged.

        The first use of an archive compares it with its digest, since a power loss may have left it incomplete.
        """
        if not _DIGEST.fullmatch(digest):
            raise ApiError(422, "a code archive is named by its SHA-256, 64 digits from 0 to f")
        path = self._path_of(digest)
        if not path.is_file():
            return None
        if digest not in self._verified:
            with path.open("rb") as file:
                is_whole = hashlib.file_digest(file, "sha256").hexdigest() == digest
            if not is_whole:
                logger.error("code archive %s is damaged and was removed; its jobs have to be submitted again", digest)
                path.unlink(missing_ok=True)
                return None
            self._verified.add(digest)
        return path

    def size(self, digest: str) -> int:
        """Return the bytes of an archive; 0 if there is none."""
        path = self._path_of(digest)
        return path.stat().st_size if path.is_file() else 0

    def delete(self, digest: str) -> None:
        """Delete an archive, if there is one."""
        self._verified.discard(digest)
        self._path_of(digest).unlink(missing_ok=True)

    def delete_partial(self, before_s: float) -> None:
        """Delete uploads that were cut off, and whose files did not change since a time of the file system."""
        for path in self._folder.glob("*.partial"):
            with suppress(OSError):
                if path.stat().st_mtime < before_s:
                    path.unlink()

    async def store(self, digest: str, chunks: AsyncIterator[bytes]) -> None:
        """Store an archive durably. All work on files is done by threads, so that other requests do not wait.

        Raises:
            ApiError: The archive is too large, or does not have this digest.
        """
        if await run_in_threadpool(self.path, digest):
            async for _ in chunks:
                pass
            return
        partial = self._folder / f"{secrets.token_hex(8)}.partial"
        try:
            received = await _receive(partial, chunks)
            if received != digest:
                raise ApiError(422, "the archive does not have this SHA-256; upload it again")
            await run_in_threadpool(self._publish, partial, digest)
        finally:
            await run_in_threadpool(partial.unlink, missing_ok=True)

    def _publish(self, partial: Path, digest: str) -> None:
        partial.replace(self._path_of(digest))
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self._verified.add(digest)

    def _path_of(self, digest: str) -> Path:
        return self._folder / f"{digest}.tar.gz"


async def _receive(path: Path, chunks: AsyncIterator[bytes]) -> str:
    """Write chunks to a file and to the disk, and return their digest."""
    size, digest, part = 0, hashlib.sha256(), bytearray()

    def write(file: BinaryIO, data: bytes, *, is_last: bool = False) -> None:
        digest.update(data)
        file.write(data)
        if is_last:
            file.flush()
            os.fsync(file.fileno())

    with await run_in_threadpool(path.open, "wb") as file:
        async for chunk in chunks:
            size += len(chunk)
            if size > MAX_CODE_ARCHIVE_BYTES:
                limit = f"{MAX_CODE_ARCHIVE_BYTES >> 20} MiB"
                raise ApiError(413, f"the archive is larger than {limit}; exclude data with a .mimatrixignore file")
            part += chunk
            if len(part) >= _PART_BYTES:
                await run_in_threadpool(write, file, bytes(part))
                part.clear()
        await run_in_threadpool(write, file, bytes(part), is_last=True)
    return digest.hexdigest()
