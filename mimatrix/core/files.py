"""Files that appear complete or not at all."""

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def write_atomic(path: Path, content: str | bytes, *, mode: int = 0o666) -> None:
    """Write a file so that readers see either its old content or all of the new.

    Args:
        path: The file. Its directory must exist.
        content: Text is encoded as UTF-8.
        mode: Permissions of the new file, reduced by the process's umask.

    Raises:
        OSError: The file could not be written; an old one is untouched.
    """

    def write(partial: Path) -> None:
        partial.touch(mode, exist_ok=False)
        partial.write_bytes(_encode(content))

    replace_atomic(path, write)


def create_atomic(path: Path, content: str | bytes) -> None:
    """Create a file with all of its content; of several processes that try, one succeeds.

    Raises:
        FileExistsError: There is such a file already; it is untouched.
        OSError: The file could not be written.
    """

    def link(partial: Path) -> None:
        partial.write_bytes(_encode(content))
        os.link(partial, path)

    _with_partial(path, link)


def replace_atomic(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file in the directory of `path`, then rename it to `path`."""

    def write_and_rename(partial: Path) -> None:
        write(partial)
        partial.replace(path)

    _with_partial(path, write_and_rename)


def _with_partial(path: Path, use: Callable[[Path], None]) -> None:
    """Name a temporary file in the same directory for `use`, and remove it if it is left over."""
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        use(partial)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _encode(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content
