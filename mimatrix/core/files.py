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
    data = content.encode() if isinstance(content, str) else content

    def write(partial: Path) -> None:
        partial.touch(mode, exist_ok=False)
        partial.write_bytes(data)

    replace_atomic(path, write)


def replace_atomic(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it to `path`; on failure remove it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        write(partial)
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
