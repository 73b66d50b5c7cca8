"""How a checkpoint lies on disk.

    checkpoints/
      step-00000120/           complete: it gets this name when all of it is there
        __0_0.distcp ...       the tensors, a file from each rank, flat
        .metadata              the index of torch.distributed.checkpoint, which reads these two by itself
        run.json               everything else, and the checksum of every file
      .unfinished-...          being written, or left by a crash: the next save removes it

A path is only ever renamed into place, never written in place.
"""

import json
import os
import pickle
import re
import shutil
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from mimatrix.core.errors import WorldError

FORMAT = 1
_RUN, _INDEX = "run.json", ".metadata"
_NAME = re.compile(r"step-(\d{8,})(-\d+)?")
_UNFINISHED, _GONE = ".unfinished-", ".gone-"
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Elements from `start` on of a flat tensor that has `count` in all: what one rank writes of it, or reads.

    torch.distributed.checkpoint knows these methods by their names (its `_Checkpointable`).
    """

    value: torch.Tensor
    start: int
    count: int

    def size(self) -> torch.Size:
        """Of the whole tensor."""
        return torch.Size([self.count])

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        data = TensorWriteData(self._chunk(), TensorProperties(dtype=self.value.dtype), self.size())
        return [WriteItem(MetadataIndex(key, [self.start]), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()]

    def __get_tensor_shard__(self, _: MetadataIndex) -> torch.Tensor:
        return self.value

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([self.start]), self.value.size())


TensorSlices = Mapping[str, TensorSlice]


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """What one rank has written: for the index, and the size and checksum of its file."""

    plan: SavePlan
    results: list[WriteResult]
    files: dict[str, list[int]]
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint that is there."""

    path: str
    step: int
    at_s: float
    """Since 1970."""
    bytes: int


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, parts: TensorSlices) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.set_up_planner(dict(parts))

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, parts: TensorSlices, metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.state_dict, self.metadata = dict(parts), metadata

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        found: torch.Tensor = self.state_dict[index.fqn].__get_tensor_shard__(index)
        return found


# Writing


def begin(folder: Path, step: int, whose: str = "") -> Path:
    """A new place to write to, in a folder free of what crashes have left; `whose`, where several write beside."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in [*folder.glob(f"{_UNFINISHED}{whose}*"), *folder.glob(f"{_GONE}*")]:
        shutil.rmtree(left, ignore_errors=True)
    place = folder / f"{_UNFINISHED}{whose}{step:08d}-{os.urandom(4).hex()}"
    place.mkdir()
    return place


def write_part(place: Path, rank: int, parts: TensorSlices, facts: dict[str, Any]) -> None:
    """One rank's file, and beside it what `publish` must know of it."""
    planner, writer = _SavePlanner(parts), FileSystemWriter(place, per_thread_copy_ahead=0)
    # The storage names a plan's file by the plan's number, so ours must come at the place of this rank.
    plans = writer.prepare_global_plan([*[SavePlan([])] * rank, planner.create_local_plan()])
    results = writer.write_data(plans[rank], planner).wait()
    names = {result.storage_data.relative_path for result in results}
    written = WrittenFiles(plans[rank], results, {name: _sum_of(place / name) for name in sorted(names)}, facts)
    _write(_note(place, rank), pickle.dumps(written))


def read_notes(place: Path, ranks: int) -> list[WrittenFiles]:
    """What all ranks have written."""
    return [_read_note(place, rank) for rank in range(ranks)]


def publish(place: Path, written: Sequence[WrittenFiles], facts: Mapping[str, Any]) -> Path:
    """All ranks have written: complete the checkpoint and give it its name."""
    _, metadata = _SavePlanner({}).create_global_plan([each.plan for each in written])
    FileSystemWriter(place).finish(metadata, [each.results for each in written])
    files = {name: found for each in written for name, found in each.files.items()}
    files[_INDEX] = _sum_of(place / _INDEX)
    for rank in range(len(written)):
        _note(place, rank).unlink()
    whole = {"format": FORMAT, "saved_at": time.time(), **facts, "files": files}
    _write(place / _RUN, json.dumps(whole, indent=1).encode())
    _sync_folder(place)
    found = _renamed(place, facts["step"])
    _sync_folder(found.parent)
    return found


def prune(folder: Path, keep: int) -> None:
    """Leave the newest `keep` checkpoints of a folder."""
    for old in checkpoints_in(folder)[keep:]:
        # By another name first: half removed it must not look like one.
        gone = old.rename(old.with_name(f"{_GONE}{old.name}-{os.urandom(4).hex()}"))
        shutil.rmtree(gone, ignore_errors=True)


def remove(place: Path) -> None:
    """What could not be finished."""
    shutil.rmtree(place, ignore_errors=True)


# Reading


def is_checkpoint(path: Path) -> bool:
    """Whether a path is one checkpoint rather than a folder of them."""
    return (path / _RUN).is_file() or (path / _INDEX).is_file()


def checkpoints_in(folder: Path) -> list[Path]:
    """Those with a checkpoint's name, the one saved last first: a run that went back to an older one goes on there."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=_saved_at, reverse=True)


def listed(folder: Path, most: int = 20) -> tuple[CheckpointInfo, ...]:
    """The checkpoints of a folder that are whole, the one saved last first."""
    found = []
    for path in checkpoints_in(folder)[:most]:
        with suppress(WorldError, KeyError):  # half copied by somebody, or of another version
            facts = read_facts(path)
            weight = sum(size for size, _ in facts["files"].values())
            found.append(CheckpointInfo(str(path), facts["step"], facts["saved_at"], weight))
    return tuple(found)


def read_facts(path: Path) -> dict[str, Any]:
    """What is not a tensor."""
    try:
        facts: dict[str, Any] = json.loads((path / _RUN).read_bytes())
        known = facts["format"]
        assert isinstance(facts["files"], dict)
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise WorldError(f"{_RUN} cannot be read ({_why(error)})") from error
    if known != FORMAT:
        raise WorldError(f"it has format {known}, and this version of mimatrix reads {FORMAT}")
    return facts


def verify(path: Path, facts: Mapping[str, Any], rank: int = 0, ranks: int = 1) -> None:
    """Raise if a file is not what was written; ranks share the work."""
    for name, wanted in list(facts["files"].items())[rank::ranks]:
        try:
            found = _sum_of(path / name)
        except OSError as error:
            raise WorldError(f"{name} cannot be read ({_why(error)})") from error
        if found != wanted:
            what = f"has {found[0]} bytes of {wanted[0]}" if found[0] != wanted[0] else "has another checksum"
            raise WorldError(f"{name} {what}")


class TensorReader:
    """The tensors of a checkpoint, by key."""

    def __init__(self, path: Path) -> None:
        self._reader = FileSystemReader(path)

    def count(self, key: str) -> int:
        """Elements of one."""
        found = self._metadata.state_dict_metadata[key]
        assert isinstance(found, TensorStorageMetadata)
        return found.size.numel()

    def read(self, parts: TensorSlices) -> None:
        """Fill in every part."""
        planner = _LoadPlanner(parts, self._metadata)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        self._reader.read_data(planner.create_local_plan(), planner).wait()

    @cached_property
    def _metadata(self) -> Metadata:
        return self._reader.read_metadata()


def _saved_at(path: Path) -> float:
    try:
        return float(read_facts(path)["saved_at"])
    except (WorldError, KeyError, ValueError):
        with suppress(OSError):  # removed meanwhile by a group that has saved
            return path.stat().st_mtime
        return 0.0


def _renamed(place: Path, step: int) -> Path:
    while True:
        found = _free_name(place.parent, step)
        try:
            return place.rename(found)
        except OSError:
            # Another group may have had the name a moment sooner.
            if not found.exists():
                raise


def _free_name(folder: Path, step: int) -> Path:
    name, number = folder / f"step-{step:08d}", 1
    while name.exists():
        number += 1
        name = folder / f"step-{step:08d}-{number}"
    return name


def _note(place: Path, rank: int) -> Path:
    return place / f"part-{rank}"


def _read_note(place: Path, rank: int) -> WrittenFiles:
    try:
        found = pickle.loads(_note(place, rank).read_bytes())  # noqa: S301 (our own, of a moment ago)
    except FileNotFoundError as error:
        raise WorldError(f"rank 0 does not see rank {rank}'s file; use a folder that all ranks share") from error
    assert isinstance(found, WrittenFiles)
    return found


def _sum_of(path: Path) -> list[int]:
    """The size of a file and its checksum."""
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


def _why(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else type(error).__name__
