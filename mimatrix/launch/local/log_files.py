"""Output of one member on disk: the last of it, in one or two files that are named by the position of their first byte.

The names are all that has to be known about what was dropped, so no count can disagree with the files.
"""

import os
from contextlib import suppress
from io import FileIO
from pathlib import Path

from mimatrix.launch.launcher import LogPart

PART_BYTES = 8 << 20
_KEPT = 2


class RotatingLog:
    """Takes all output of one member and keeps the last of it: at most two files of about `part_bytes`."""

    def __init__(self, folder: Path, part_bytes: int = PART_BYTES) -> None:
        self._folder = folder
        self._part_bytes = part_bytes
        self._start = self._end = 0
        self._file: FileIO | None = None

    def write(self, data: bytes) -> None:
        """Keep `data`, which readers see at once. What the disk does not take is dropped."""
        left = memoryview(data)
        try:
            while left:
                left = left[self._append(left) :]
        except OSError:
            # A full disk is no reason to end a team. The next file is named so that the gap is seen.
            self._end += len(left)
            self.close()
        if self._end - self._start >= self._part_bytes:
            self.close()

    def close(self) -> None:
        """Close the file; what is written next begins another one."""
        if self._file:
            with suppress(OSError):
                self._file.close()
        self._file = None

    def _append(self, data: memoryview) -> int:
        if self._file is None:
            self._file = self._open_next()
            self._start = self._end
        written = self._file.write(data)
        self._end += written
        return written

    def _open_next(self) -> FileIO:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for start in _starts(self._folder)[: 1 - _KEPT]:
            (self._folder / str(start)).unlink(missing_ok=True)
        return (self._folder / str(self._end)).open("ab", buffering=0)


def read_log(folder: Path, offset: int, most: int) -> LogPart:
    """Return at most `most` bytes from `offset` on, or from the oldest byte that is kept; below 0: from the end."""
    data, at = b"", offset if offset >= 0 else max(0, _end(folder) + offset)
    for start, part in _parts(folder, at):
        if data and start > at:
            break  # what was dropped in between must be visible as a jump between two answers
        piece = _read(part, max(0, at - start), most - len(data))
        at = max(at, start) + len(piece) if piece else at
        data += piece
    return LogPart(data, at)


def _parts(folder: Path, offset: int) -> list[tuple[int, Path]]:
    """Return the files that hold bytes from `offset` on, in order."""
    starts = _starts(folder)
    holder = max((start for start in starts if start <= offset), default=0)
    return [(start, folder / str(start)) for start in starts if start >= holder]


def _read(part: Path, offset: int, most: int) -> bytes:
    try:
        with part.open("rb") as file:
            # There is nothing beyond its end, and some file systems refuse to seek there.
            file.seek(min(offset, os.fstat(file.fileno()).st_size))
            return file.read(most)
    except FileNotFoundError:
        return b""  # dropped meanwhile


def _end(folder: Path) -> int:
    """Return how many bytes were ever written, as far as the files say."""
    for start in _starts(folder)[-1:]:
        with suppress(FileNotFoundError):
            return start + (folder / str(start)).stat().st_size
    return 0


def _starts(folder: Path) -> list[int]:
    try:
        return sorted(int(path.name) for path in folder.iterdir())
    except FileNotFoundError:
        return []
