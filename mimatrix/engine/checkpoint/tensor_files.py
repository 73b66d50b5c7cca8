"""The tensors of a checkpoint: files that ranks write with torch.distributed.checkpoint, and our index of them.

Where a tensor is in the files stands in `tensors.json`. torch keeps the same in a pickle, `.metadata`, which is written
for torch's own tools and never read here: to load a pickle is to run what it says.
"""

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
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
from mimatrix.engine.checkpoint.json_codec import dtype_name, parse_dtype

INDEX, TORCH_INDEX = "tensors.json", ".metadata"
"""Our index of the tensors, and the one that torch.distributed.checkpoint reads."""
TensorIndex = dict[str, dict[str, Any]]
"""By key: `dtype`, `count`, and `chunks`, each of which is [start, count, file, offset in the file, bytes]."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A run of elements of a flat tensor of `count` elements, from `start` on: what one rank writes or reads of it.

    torch.distributed.checkpoint calls these methods by name (its `_Checkpointable` protocol).
    """

    value: torch.Tensor
    start: int
    count: int

    def size(self) -> torch.Size:
        """Return the size of the whole tensor."""
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
        tensor: torch.Tensor = self.state_dict[index.fqn].__get_tensor_shard__(index)
        return tensor


def write_tensors(folder: Path, rank: int, parts: TensorSlices) -> TensorIndex:
    """Write one rank's tensors, and return where they are."""
    planner, writer = _SavePlanner(parts), FileSystemWriter(folder, per_thread_copy_ahead=0)
    # The storage names a file after the number of its plan, so ours must come at the index of this rank.
    plans = writer.prepare_global_plan([*[SavePlan([])] * rank, planner.create_local_plan()])
    try:
        results = writer.write_data(plans[rank], planner).wait()
    except RuntimeError as error:
        # torch.save closes its archive after the disk has failed, and that failure hides the first one.
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None
    return {result.index.fqn: _describe_written(parts[result.index.fqn], result.storage_data) for result in results}


def list_files(index: TensorIndex) -> set[str]:
    """Return the names of the files that hold the tensors."""
    return {file for entry in index.values() for _, _, file, _, _ in entry["chunks"]}


def merge_indexes(by_rank: Sequence[TensorIndex]) -> TensorIndex:
    """Merge what all ranks have written, which must be every element once."""
    merged: TensorIndex = {}
    for index in by_rank:
        for key, entry in index.items():
            chunks = merged.setdefault(key, {**entry, "chunks": []})["chunks"]
            chunks.extend(entry["chunks"])
    for key, entry in merged.items():
        _check_is_whole(key, entry)
    return merged


def write_torch_index(folder: Path, index: TensorIndex) -> None:
    """Write the index that torch's own tools read."""
    metadata = _torch_metadata(index)
    places: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
    results = [WriteResult(where, place.length, place) for where, place in places.items()]
    FileSystemWriter(folder).finish(metadata, [results])


class TensorReader:
    """The tensors of a checkpoint, by key."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self._path, self._reader = path, FileSystemReader(path)
        self._index: TensorIndex = _read_index(path)
        for file in list_files(self._index):
            if file not in metadata["files"]:
                raise WorldError(f'{INDEX} names a file that is not in it: "{file}"')

    def has(self, key: str) -> bool:
        """Return whether there is a tensor of this key."""
        return key in self._index

    def count(self, key: str) -> int:
        """Return the number of elements of a tensor."""
        return int(self._index[key]["count"])

    def read(self, parts: TensorSlices) -> None:
        """Fill every slice from the tensor of the same key."""
        planner = _LoadPlanner(parts, self._torch_metadata)
        self._reader.set_up_storage_reader(self._torch_metadata, is_coordinator=False)
        try:
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except pickle.UnpicklingError as error:  # torch's message advises to read it unchecked
            raise WorldError(f"{self._path.name} has files of something other than tensors") from error

    @cached_property
    def _torch_metadata(self) -> Metadata:
        return _torch_metadata(self._index)


def _read_index(path: Path) -> TensorIndex:
    try:
        index: TensorIndex = json.loads((path / INDEX).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise WorldError(f"{INDEX} of {path.name} cannot be read ({type(error).__name__})") from error
    return index


def _describe_written(part: TensorSlice, storage: _StorageInfo) -> dict[str, Any]:
    chunk = [part.start, part.value.numel(), storage.relative_path, storage.offset, storage.length]
    return {"dtype": dtype_name(part.value.dtype), "count": part.count, "chunks": [chunk]}


def _check_is_whole(key: str, entry: Mapping[str, Any]) -> None:
    end = 0
    for start, count, *_ in sorted(entry["chunks"]):
        if start != end:
            raise WorldError(
                f"{key} is not written once as a whole: one rank ends at {end}, the next begins at {start}"
            )
        end += count
    if end != entry["count"]:
        raise WorldError(f"{key} has {entry['count']} elements, and ranks have written {end}")


def _torch_metadata(index: TensorIndex) -> Metadata:
    """Return the same index as torch.distributed.checkpoint has it."""
    tensors = {
        key: TensorStorageMetadata(
            TensorProperties(dtype=parse_dtype(entry["dtype"])),
            torch.Size([entry["count"]]),
            [ChunkStorageMetadata(torch.Size([start]), torch.Size([count])) for start, count, *_ in entry["chunks"]],
        )
        for key, entry in index.items()
    }
    places = {
        MetadataIndex(key, [start], number): _StorageInfo(file, offset, length)
        for key, entry in index.items()
        for number, (start, _, file, offset, length) in enumerate(entry["chunks"])
    }
    return Metadata(dict(tensors), storage_data=places)
