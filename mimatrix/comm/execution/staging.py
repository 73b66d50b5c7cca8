"""Staging for tensors outside the arena: chunks that pass through slots small enough to stay in cache."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby, pairwise

import torch

from mimatrix.collectives.shares import Shares
from mimatrix.comm.execution.program import Serve
from mimatrix.comm.memory.arena import Arena, Slot
from mimatrix.core.errors import WorldError

CHUNK_BYTES = {"host": 1 << 20, "cuda": 32 << 20, "remote": 4 << 20}
"""By window kind: what stays in cache, what is worth a few kernels, what is worth a round between hosts."""
BUCKET_CHUNK_BYTES = 8 << 20
"""Of DDP's buckets at a time: they need no staging, so only the sums have to stay in cache."""


@dataclass(frozen=True, slots=True)
class StagedChunk:
    """A part of a collective's data: how many elements, and how they are copied into a staging slot and out of it."""

    count: int
    fill: Callable[[torch.Tensor], object]
    drain: Callable[[torch.Tensor], object]
    outside: torch.Tensor | None = None
    """The elements themselves, if they are copied in and out as they lie."""

    def fill_slot(self, slot: Slot, dtype: torch.dtype, only: Sequence[Serve] | None = None) -> None:
        """Wait until the slot has no readers, then copy the chunk into it, or `only` what peers read of it."""
        slot.wait_readers()
        staged = slot.tensor(dtype, self.count)
        if only is None or self.outside is None:
            self.fill(staged)
            return
        for serve in only:
            staged[serve.start : serve.stop].copy_(self.outside[serve.start : serve.stop])


class StagingSlots:
    """Two slots of each size in each of a group's arenas, used in turn."""

    def __init__(self, arenas: Mapping[str, Arena], world_size: int) -> None:
        self._arenas, self._world_size = arenas, world_size
        self._slots: dict[tuple[str, int], list[Slot]] = {}
        self._pinned: list[Slot] = []

    def get(self, window_kind: str, chunk_bytes: int) -> list[Slot]:
        """Return the two slots for chunks of this size; allocate them at the first call."""
        key = (window_kind, chunk_bytes)
        if key not in self._slots:
            size = chunk_bytes + 64 * self._world_size
            slots = self._slots[key] = [self._arenas[window_kind].allocate(size) for _ in range(2)]
            if window_kind == "host" and torch.cuda.is_available():
                _pin(slots)
                self._pinned += slots
        return self._slots[key]

    def close(self) -> None:
        """Return all slots to their arenas once peers have read them."""
        _unpin(self._pinned)
        self._pinned.clear()
        for slot in (slot for slots in self._slots.values() for slot in slots):
            with suppress(WorldError):  # lost peers do not read any more
                slot.wait_readers()
            slot.arena.release(slot)
        self._slots.clear()


class PinnedBuffer:
    """Pinned host memory for GPU tensors that Gloo carries; it grows to the largest. For one thread at a time."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def like(self, flat: torch.Tensor) -> torch.Tensor:
        """Return host memory for a flat tensor, without its data."""
        if len(self._bytes) < flat.nbytes:
            try:
                self._bytes = torch.empty(flat.nbytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError:  # the system allows no more; copies are only slower
                self._bytes = torch.empty(flat.nbytes, dtype=torch.uint8)
        return self._bytes[: flat.nbytes].view(flat.dtype)


def as_one(flat: torch.Tensor) -> StagedChunk:
    """Return all of a flat tensor as one chunk."""
    return StagedChunk(flat.numel(), partial(_copy_to, flat), flat.copy_, flat)


def chunks(flat: torch.Tensor, chunk_bytes: int) -> Iterator[StagedChunk]:
    """Yield a flat tensor in chunks of at most `chunk_bytes`."""
    step = chunk_bytes // flat.element_size()
    for start in range(0, max(1, flat.numel()), step):
        yield as_one(flat[start : start + step])


def sharded_chunks(
    flat: torch.Tensor, shard_counts: Sequence[int], chunk_bytes: int
) -> Iterator[tuple[Shares, list[StagedChunk]]]:
    """Yield a flat tensor in chunks that hold a slice of every rank's shard, grouped by the shares of those slices.

    All shards are cut into equally many slices, so that all chunks but the last are alike.
    """
    ends = list(accumulate(shard_counts, initial=0))
    number = -(-flat.nbytes // chunk_bytes)
    steps = [-(-count // number) for count in shard_counts]

    def slices(index: int) -> list[torch.Tensor]:
        return [
            flat[min(start + index * step, end) : min(start + (index + 1) * step, end)]
            for (start, end), step in zip(pairwise(ends), steps, strict=True)
        ]

    def counts(index: int) -> tuple[int, ...]:
        return tuple(part.numel() for part in slices(index))

    for sizes, indices in groupby(range(number), counts):
        if any(sizes):
            yield Shares.of(sizes), [_joined_chunk(slices(index)) for index in indices]


def reduce_scatter_chunks(
    output: torch.Tensor, source: torch.Tensor, rank: int, world_size: int, chunk_bytes: int
) -> Iterator[StagedChunk]:
    """Yield the chunks of a reduce-scatter into `output`: columns of `source`, in which every rank owns a row."""
    rows = source.view(world_size, output.numel())
    for columns in _columns(output, world_size, chunk_bytes):
        part = output[columns]

        def drain(staged: torch.Tensor, part: torch.Tensor = part) -> None:
            part.copy_(staged.view(world_size, part.numel())[rank])

        yield StagedChunk(world_size * part.numel(), partial(_copy_rows, rows[:, columns]), drain)


def all_gather_chunks(
    output: torch.Tensor, source: torch.Tensor, rank: int, world_size: int, chunk_bytes: int
) -> Iterator[StagedChunk]:
    """Yield the chunks of an all-gather into `output`: columns of it, in which every rank fills its row."""
    rows = output.view(world_size, source.numel())
    for columns in _columns(source, world_size, chunk_bytes):

        def fill(staged: torch.Tensor, part: torch.Tensor = source[columns]) -> None:
            staged.view(world_size, part.numel())[rank].copy_(part)

        def drain(staged: torch.Tensor, part: torch.Tensor = rows[:, columns]) -> None:
            part.copy_(staged.view(part.shape))

        yield StagedChunk(world_size * source[columns].numel(), fill, drain)


def _joined_chunk(slices: Sequence[torch.Tensor]) -> StagedChunk:
    """Return slices of a tensor as one chunk, in which they lie one after the other."""
    sizes = [part.numel() for part in slices]

    def fill(staged: torch.Tensor) -> None:
        for inside, outside in zip(torch.split(staged, sizes), slices, strict=True):
            inside.copy_(outside)

    def drain(staged: torch.Tensor) -> None:
        for inside, outside in zip(torch.split(staged, sizes), slices, strict=True):
            outside.copy_(inside)

    return StagedChunk(sum(sizes), fill, drain)


def _columns(row: torch.Tensor, world_size: int, chunk_bytes: int) -> Iterator[slice]:
    step = max(1, chunk_bytes // (row.element_size() * world_size))
    for start in range(0, max(1, row.numel()), step):
        yield slice(start, min(start + step, row.numel()))


def _copy_to(source: torch.Tensor, staged: torch.Tensor) -> None:
    staged.copy_(source)


def _copy_rows(source: torch.Tensor, staged: torch.Tensor) -> None:
    staged.view(source.shape).copy_(source)


def _pin(slots: Sequence[Slot]) -> None:
    """Let a GPU copy to and from the slots at full speed; unpinned copies are only slower."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for slot in slots:
        runtime.cudaHostRegister(slot.bytes.data_ptr(), slot.size, 0)


def _unpin(slots: Sequence[Slot]) -> None:
    """Unpin the slots before they are reused: pinning twice fails, and not where it happens."""
    for slot in slots:
        torch.cuda.cudart().cudaHostUnregister(slot.bytes.data_ptr())  # type: ignore[no-untyped-call]


def copy_back(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a result back to `tensor` if `reshape` had to copy."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))
