"""The layout of a checkpoint on disk.

    checkpoints/
      step-00000120/           complete: it gets this name last
        __0_0.distcp ...       the tensors, flat, one file per rank
        tensors.json           where each tensor is in them
        .metadata              the same for torch.distributed.checkpoint, which can read them without us; not read here
        run.json               everything else, and the checksum of every file
      .unfinished-...          being written, or left by a crash: the next save removes it

A directory is only ever renamed into place, never written in place.
"""

import json
import math
import os
import re
import shutil
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mimatrix.core.errors import WorldError
from mimatrix.engine.checkpoint.metric import Metric
from mimatrix.engine.checkpoint.tensor_files import (
    INDEX,
    TORCH_INDEX,
    TensorIndex,
    TensorSlices,
    list_files,
    merge_indexes,
    write_tensors,
    write_torch_index,
)

FORMAT = 3
"""Version of the layout and of `run.json`; other versions are refused."""
_RUN = "run.json"
_NAME = re.compile(r"step-(\d{8,})(-\d+)?")
_UNFINISHED, _REMOVED = ".unfinished-", ".gone-"
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """What one rank has written."""

    tensors: TensorIndex
    files: dict[str, list[int]]
    """The size and checksum of each file."""
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A complete checkpoint."""

    path: str
    step: int
    at_s: float
    """When it was saved, in seconds since 1970."""
    bytes: int
    metric: float | None = None
    """What `run.save(metric=...)` was given; None where checkpoints are kept by age."""


# Writing


def create_unfinished(folder: Path, step: int, owner: str = "") -> Path:
    """Create a directory to write a checkpoint to, and remove what crashes have left.

    Args:
        folder: Where the checkpoint will be.
        step: Its step.
        owner: A prefix for the directory if several groups save to `folder`; each removes only its own leftovers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in [*folder.glob(f"{_UNFINISHED}{owner}*"), *folder.glob(f"{_REMOVED}*")]:
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished = folder / f"{_UNFINISHED}{owner}{step:08d}-{os.urandom(4).hex()}"
    unfinished.mkdir()
    return unfinished


def write_part(unfinished: Path, rank: int, parts: TensorSlices, metadata: dict[str, Any]) -> None:
    """Write one rank's file, and a note of it for `publish`."""
    tensors = write_tensors(unfinished, rank, parts)
    files = {name: _size_and_checksum(unfinished / name) for name in sorted(list_files(tensors))}
    note = {"tensors": tensors, "files": files, "metadata": metadata}
    _write(_written_path(unfinished, rank), json.dumps(note).encode())


def read_written(unfinished: Path, ranks: int) -> list[WrittenFiles]:
    """Read the notes of all ranks about what they have written."""
    return [_read_written(unfinished, rank) for rank in range(ranks)]


def publish(unfinished: Path, written: Sequence[WrittenFiles], metadata: Mapping[str, Any]) -> Path:
    """Complete a checkpoint that all ranks have written, and give it its name."""
    tensors = merge_indexes([part.tensors for part in written])
    write_torch_index(unfinished, tensors)
    _write(unfinished / INDEX, json.dumps(tensors).encode())
    files = {name: checksum for part in written for name, checksum in part.files.items()}
    files |= {name: _size_and_checksum(unfinished / name) for name in (INDEX, TORCH_INDEX)}
    for rank in range(len(written)):
        _written_path(unfinished, rank).unlink()
    run = {"format": FORMAT, "saved_at": _next_saved_at(unfinished.parent), **metadata, "files": files}
    _write(unfinished / _RUN, json.dumps(run, indent=1).encode())
    _sync_folder(unfinished)
    path = _rename_to_free_name(unfinished, metadata["step"])
    _sync_folder(path.parent)
    return path


def remove_complete(path: Path) -> None:
    """Remove a complete checkpoint."""
    shutil.rmtree(_rename_to_removed(path), ignore_errors=True)


def replace(old: Path, new: Path) -> Path:
    """Remove a checkpoint and give its name to a newer one of the same step; return where that is then.

    The new one is complete under a name of its own before, so that a crash at any moment leaves one of them.
    """
    removed = _rename_to_removed(old)
    with suppress(OSError):  # another group may have taken the name a moment earlier; the new one keeps its own
        new = new.rename(old)
    _sync_folder(new.parent)
    shutil.rmtree(removed, ignore_errors=True)
    return new


def remove(unfinished: Path) -> None:
    """Remove a checkpoint that could not be finished."""
    shutil.rmtree(unfinished, ignore_errors=True)


# Reading


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is one checkpoint rather than a folder of them."""
    return (path / _RUN).is_file() or (path / TORCH_INDEX).is_file()


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder: by time of saving, last first, so that a rewound run resumes its own.

    Where they were saved with a metric, the best comes first.
    """
    if not folder.is_dir():
        return []
    order = {path: _goodness_and_time(path) for path in folder.iterdir() if _NAME.fullmatch(path.name)}
    # Next to checkpoints with a metric, one that cannot be read comes last: it must not push out a good one.
    return sorted(
        order, key=lambda path: (-math.inf if order[path][0] is None else order[path][0], order[path][1]), reverse=True
    )


def is_whole(path: Path) -> bool:
    """Return whether every file of a checkpoint has its size; checksums are not compared."""
    try:
        files = read_metadata(path)["files"]
        return all((path / name).stat().st_size == size for name, (size, _) in files.items())
    except (OSError, WorldError, ValueError, TypeError):
        return False


def count_bytes(path: Path) -> int:
    """Return the size of a checkpoint's files."""
    return sum(size for size, _ in read_metadata(path)["files"].values())


def describe_checkpoints(folder: Path, most: int = 20) -> tuple[CheckpointInfo, ...]:
    """Describe the complete checkpoints of a folder, in the order of `list_checkpoints`."""
    checkpoints = []
    for path in list_checkpoints(folder)[:most]:
        with suppress(WorldError, KeyError):  # copied only in part, or of another version
            metadata = read_metadata(path)
            metric = Metric.from_metadata(metadata)
            info = CheckpointInfo(
                path=str(path),
                step=metadata["step"],
                at_s=metadata["saved_at"],
                bytes=count_bytes(path),
                metric=metric.value if metric else None,
            )
            checkpoints.append(info)
    return tuple(checkpoints)


def read_metadata(path: Path) -> dict[str, Any]:
    """Read everything but the tensors."""
    try:
        metadata: dict[str, Any] = json.loads((path / _RUN).read_bytes())
        version = metadata["format"]
        files = [*metadata["files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise WorldError(f"{_RUN} cannot be read ({_describe_error(error)})") from error
    if version != FORMAT:
        raise WorldError(f"it has format {version}, and this version of mimatrix reads {FORMAT}")
    for name in files:
        if Path(name).name != name or name == "..":
            raise WorldError(f'{_RUN} names a file that is not in it: "{name}"')
    return metadata


def verify(path: Path, metadata: Mapping[str, Any], rank: int = 0, ranks: int = 1) -> None:
    """Raise a `WorldError` if a file is not as it was written; each rank checks some of the files."""
    for name, wanted in list(metadata["files"].items())[rank::ranks]:
        try:
            actual = _size_and_checksum(path / name)
        except OSError as error:
            raise WorldError(f"{name} cannot be read ({_describe_error(error)})") from error
        if actual != wanted:
            what = f"has {actual[0]} bytes of {wanted[0]}" if actual[0] != wanted[0] else "has another checksum"
            raise WorldError(f"{name} {what}")


def _goodness_and_time(path: Path) -> tuple[float | None, float]:
    """Return how good the metric of a checkpoint is, if it has one, and when it was saved."""
    try:
        metadata = read_metadata(path)
        metric = Metric.from_metadata(metadata)
        return metric.goodness if metric else None, float(metadata["saved_at"])
    except (WorldError, KeyError, ValueError):
        with suppress(OSError):  # another group that saved has removed it
            return None, path.stat().st_mtime
        return None, 0.0


def _next_saved_at(folder: Path) -> float:
    """Return the time, or what comes after the newest checkpoint where the clock was ahead when that was saved."""
    times = [_goodness_and_time(path)[1] for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return max(time.time(), math.nextafter(max(times, default=0.0), math.inf))


def _rename_to_removed(path: Path) -> Path:
    """Rename a checkpoint before it is removed: a partly removed one must not look like a checkpoint."""
    return path.rename(path.with_name(f"{_REMOVED}{path.name}-{os.urandom(4).hex()}"))


def _rename_to_free_name(unfinished: Path, step: int) -> Path:
    while True:
        path = _find_free_name(unfinished.parent, step)
        try:
            return unfinished.rename(path)
        except OSError:
            # Another group may have taken the name a moment earlier.
            if not path.exists():
                raise


def _find_free_name(folder: Path, step: int) -> Path:
    path, number = folder / f"step-{step:08d}", 1
    while path.exists():
        number += 1
        path = folder / f"step-{step:08d}-{number}"
    return path


def _written_path(unfinished: Path, rank: int) -> Path:
    return unfinished / f"part-{rank}"


def _read_written(unfinished: Path, rank: int) -> WrittenFiles:
    try:
        note = json.loads(_written_path(unfinished, rank).read_bytes())
    except FileNotFoundError as error:
        raise WorldError(f"rank 0 does not see rank {rank}'s file; use a folder that all ranks share") from error
    return WrittenFiles(note["tensors"], note["files"], note["metadata"])


def _size_and_checksum(path: Path) -> list[int]:
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return [size, checksum]


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _describe_error(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else type(error).__name__
