"""The folder of a script as an archive: later edits do not change a job that waits."""

import gzip
import hashlib
import tarfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from mimatrix.core.errors import UserError
from mimatrix.core.units import format_bytes

IGNORE_FILE = ".mimatrixignore"
_ALWAYS = (
    ".git",
    ".hg",
    ".venv",
    "venv",
    "__pycache__",
    "*.pyc",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    "node_modules",
)
_USUAL = ("checkpoints", "runs", "wandb", "*.pt", "*.ckpt", "*.safetensors")
_MOST_FILES = 20_000


def archive(folder: Path, target: Path, most_bytes: int, script: str = "") -> str:
    """Write the folder's files to `target` as .tar.gz; its SHA-256. The same files give the same archive.

    The script is taken along whatever it matches, and wherever it is a link to.
    """
    files = list(_files(folder))
    if script and folder / script not in files:
        files.append(folder / script)
    size = sum(path.stat().st_size for path in files)
    if size > most_bytes or len(files) > _MOST_FILES:
        what = f"{len(files):,} files" if len(files) > _MOST_FILES else format_bytes(size)
        raise UserError(
            f"the folder {folder} has {what} to take along, and {format_bytes(most_bytes)} in {_MOST_FILES:,} files is "
            f"the most; name what to leave out in {IGNORE_FILE}, one pattern a line{_largest(folder, files)}"
        )
    with (
        target.open("wb") as raw,
        gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for path in files:
            _add(tar, path, path.relative_to(folder).as_posix())
    return hashlib.sha256(target.read_bytes()).hexdigest()


def _add(tar: tarfile.TarFile, path: Path, name: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = path.stat().st_size, path.stat().st_mode & 0o777
    with path.open("rb") as data:
        tar.addfile(entry, data)


def _files(folder: Path) -> Iterator[Path]:
    """In order; links are followed if they stay inside, and left out otherwise."""
    patterns = (*_ALWAYS, *_own_patterns(folder))
    inside = folder.resolve()
    for path in sorted(folder.iterdir()):
        yield from _below(path, folder, inside, patterns)


def _below(path: Path, folder: Path, inside: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    name = path.relative_to(folder).as_posix()
    if any(fnmatch(path.name, pattern) or fnmatch(name, pattern) for pattern in patterns):
        return
    try:
        if not path.resolve(strict=True).is_relative_to(inside):
            return
    except (OSError, RuntimeError):
        return  # a link to nowhere, or in a circle
    if path.is_dir() and not path.is_symlink():
        for each in sorted(path.iterdir()):
            yield from _below(each, folder, inside, patterns)
    elif path.is_file():
        yield path


def _own_patterns(folder: Path) -> tuple[str, ...]:
    """Of the ignore file; without one, what is usually large and made by training."""
    file = folder / IGNORE_FILE
    if not file.is_file():
        return _USUAL
    lines = (line.strip().rstrip("/") for line in file.read_text(encoding="utf-8").splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


def _largest(folder: Path, files: list[Path]) -> str:
    found = max(files, key=lambda path: path.stat().st_size, default=None)
    if found is None:
        return ""
    return f" (the largest is {found.relative_to(folder).as_posix()}, {format_bytes(found.stat().st_size)})"
