"""Archive the directory of a script, so that later edits do not change a waiting job."""

import gzip
import hashlib
import tarfile
from collections.abc import Callable, Iterator, Sequence
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
_USUAL = ("checkpoints", "runs", "wandb", "*.pt", "*.ckpt", "*.distcp", "*.safetensors")
_MOST_FILES = 20_000
_MOST_NAMED = 5


def archive(
    folder: Path,
    target: Path,
    most_bytes: int,
    script: str = "",
    others: Sequence[Path] = (),
    say: Callable[[str], None] = lambda _: None,
) -> str:
    """Write a directory's files to `target` as .tar.gz and return its SHA-256. Equal files give equal archives.

    The script and the `others`, which are put next to it, are included whatever patterns they match, and wherever links
    lead. Links that are left out are reported by `say`.
    """
    walk = _Walk(folder)
    files = {path.relative_to(folder).as_posix(): path for path in walk.files()}
    if script:
        files[script] = folder / script
    files |= _beside(script, others)
    _check_size(folder, files, most_bytes)
    with (
        target.open("wb") as raw,
        gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for name, path in files.items():
            _add(tar, path, name)
    left_out = [name for name in walk.left_out if name not in files]
    if left_out:
        say(_left_out(left_out))
    return hashlib.sha256(target.read_bytes()).hexdigest()


def _beside(script: str, others: Sequence[Path]) -> dict[str, Path]:
    """Return other files by their names; they replace files of the directory, but not the script."""
    found: dict[str, Path] = {}
    for path in others:
        if not path.is_file():
            raise UserError(f'there is no file "{path}" to upload; check its path')
        if path.name in found or path.name == script:
            what = "the script" if path.name == script else f'"{found[path.name]}"'
            raise UserError(f'"{path}" and {what} would both be "{path.name}" next to the script; rename one of them')
        found[path.name] = path
    return found


def _check_size(folder: Path, files: dict[str, Path], most_bytes: int) -> None:
    sizes = {name: path.stat().st_size for name, path in files.items()}
    size = sum(sizes.values())
    if size <= most_bytes and len(files) <= _MOST_FILES:
        return
    what = f"more than {_MOST_FILES:,} files" if len(files) > _MOST_FILES else format_bytes(size)
    largest = max(sizes, key=sizes.__getitem__)
    raise UserError(
        f"the folder {folder} has {what} to upload, and {format_bytes(most_bytes)} in {_MOST_FILES:,} files is "
        f"the most; name what to leave out in {IGNORE_FILE}, one pattern a line "
        f"(the largest is {largest}, {format_bytes(sizes[largest])})"
    )


def _add(tar: tarfile.TarFile, path: Path, name: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = path.stat().st_size, path.stat().st_mode & 0o777
    with path.open("rb") as data:
        tar.addfile(entry, data)


class _Walk:
    """The files below a directory, in order. Links are followed if they stay inside, and noted otherwise."""

    def __init__(self, folder: Path) -> None:
        self.left_out: list[str] = []
        self._folder, self._inside = folder, folder.resolve()
        self._patterns = (*_ALWAYS, *_own_patterns(folder))

    def files(self) -> Iterator[Path]:
        """Yield the files, but no more than it takes to see that they are too many."""
        for count, path in enumerate(self._below(self._folder, in_link=False)):
            if count > _MOST_FILES:
                return
            yield path

    def _below(self, folder: Path, *, in_link: bool) -> Iterator[Path]:
        for path in sorted(folder.iterdir()):
            name = path.relative_to(self._folder).as_posix()
            if any(fnmatch(path.name, pattern) or fnmatch(name, pattern) for pattern in self._patterns):
                continue
            is_link = path.is_symlink()
            if is_link and not self._may_follow(path, in_link=in_link):
                self.left_out.append(name)
            elif path.is_dir():
                yield from self._below(path, in_link=in_link or is_link)
            elif path.is_file():
                yield path

    def _may_follow(self, link: Path, *, in_link: bool) -> bool:
        try:
            target = link.resolve(strict=True)
        except (OSError, RuntimeError):
            return False  # broken, or a loop
        if not target.is_relative_to(self._inside):
            return False
        # A folder that is above its link has no end, and linked folders in linked folders multiply.
        return not target.is_dir() or not (in_link or link.parent.resolve().is_relative_to(target))


def _own_patterns(folder: Path) -> tuple[str, ...]:
    """Return the patterns of the ignore file; without one, those of large files that training makes."""
    file = folder / IGNORE_FILE
    if not file.is_file():
        return _USUAL
    lines = (line.strip().rstrip("/") for line in file.read_text(encoding="utf-8").splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


def _left_out(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    named = ", ".join(names[:_MOST_NAMED])
    return (
        f"links that lead out of the folder, in a circle or nowhere were left out: {named}{more}; "
        f"upload a file with --file, or name them in {IGNORE_FILE}"
    )
