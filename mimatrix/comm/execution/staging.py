"""Tensors outside the arena pass through stages: slots small enough to stay in cache, filled and emptied in turn."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby, pairwise

import torch

from mimatrix.collectives.shares import Shares
from mimatrix.comm.execution.program import Serve
from mimatrix.comm.memory.arena import Slot

STAGE_BYTES = {"host": 1 << 20, "cuda": 32 << 20, "far": 4 << 20}
"""By the kind of windows: what stays in cache, what is worth a few kernels, what is worth a round between hosts."""
BUCKET_BYTES = 8 << 20
"""Of DDP's buckets at a time: they need no stage, so it is only the sums that should stay in cache."""


@dataclass(frozen=True, slots=True)
class StagedChunk:
    """A part of what a collective works on: how many elements, how they get into a stage and out of it."""

    count: int
    fill: Callable[[torch.Tensor], object]
    drain: Callable[[torch.Tensor], object]
    outside: torch.Tensor | None = None
    """The elements themselves, where they are filled and drained as they lie."""

    def fill_slot(self, slot: Slot, dtype: torch.dtype, only: Sequence[Serve] | None = None) -> None:
        """Put it into a stage, once that has been read by all; or `only` what peers take of it."""
        slot.reuse()
        stage = slot.tensor(dtype, self.count)
        if only is None or self.outside is None:
            self.fill(stage)
            return
        for give in only:
            stage[give.start : give.stop].copy_(self.outside[give.start : give.stop])


def whole(flat: torch.Tensor) -> StagedChunk:
    """All of a flat tensor at once."""
    return StagedChunk(flat.numel(), partial(_copy_to, flat), flat.copy_, flat)


def in_pieces(flat: torch.Tensor, stage_bytes: int) -> Iterator[StagedChunk]:
    """A flat tensor, cut to the size of a stage."""
    step = stage_bytes // flat.element_size()
    for start in range(0, max(1, flat.numel()), step):
        yield whole(flat[start : start + step])


def in_shared_pieces(
    flat: torch.Tensor, parts: Sequence[int], stage_bytes: int
) -> Iterator[tuple[Shares, list[StagedChunk]]]:
    """A flat tensor of which every rank has a part, cut so that a piece has something of every part; by their shares.

    Parts are cut into equally many pieces, so that all but the last are alike.
    """
    ends = list(accumulate(parts, initial=0))
    turns = -(-flat.numel() * flat.element_size() // stage_bytes)
    steps = [-(-part // turns) for part in parts]

    def slices(turn: int) -> list[torch.Tensor]:
        return [
            flat[min(start + turn * step, end) : min(start + (turn + 1) * step, end)]
            for (start, end), step in zip(pairwise(ends), steps, strict=True)
        ]

    def counts(turn: int) -> tuple[int, ...]:
        return tuple(each.numel() for each in slices(turn))

    for sizes, alike in groupby(range(turns), counts):
        if any(sizes):
            yield Shares.of(sizes), [_joined(slices(turn)) for turn in alike]


def _joined(slices: Sequence[torch.Tensor]) -> StagedChunk:
    """Slices of a tensor, one after the other in the stage."""
    sizes = [each.numel() for each in slices]

    def fill(stage: torch.Tensor) -> None:
        for inside, outside in zip(torch.split(stage, sizes), slices, strict=True):
            inside.copy_(outside)

    def drain(stage: torch.Tensor) -> None:
        for inside, outside in zip(torch.split(stage, sizes), slices, strict=True):
            outside.copy_(inside)

    return StagedChunk(sum(sizes), fill, drain)


def scatter_pieces(
    output: torch.Tensor, source: torch.Tensor, rank: int, world_size: int, stage_bytes: int
) -> Iterator[StagedChunk]:
    """For a reduce-scatter into `output`: columns of `source`, of which every rank owns a row."""
    rows = source.view(world_size, output.numel())
    for columns in _columns(output, world_size, stage_bytes):
        part = output[columns]

        def drain(stage: torch.Tensor, part: torch.Tensor = part) -> None:
            part.copy_(stage.view(world_size, part.numel())[rank])

        yield StagedChunk(world_size * part.numel(), partial(_copy_rows, rows[:, columns]), drain)


def gather_pieces(
    output: torch.Tensor, source: torch.Tensor, rank: int, world_size: int, stage_bytes: int
) -> Iterator[StagedChunk]:
    """For an all-gather into `output`: columns of it, of which every rank fills its row."""
    rows = output.view(world_size, source.numel())
    for columns in _columns(source, world_size, stage_bytes):

        def fill(stage: torch.Tensor, part: torch.Tensor = source[columns]) -> None:
            stage.view(world_size, part.numel())[rank].copy_(part)

        def drain(stage: torch.Tensor, part: torch.Tensor = rows[:, columns]) -> None:
            part.copy_(stage.view(part.shape))

        yield StagedChunk(world_size * source[columns].numel(), fill, drain)


def _columns(row: torch.Tensor, world_size: int, stage_bytes: int) -> Iterator[slice]:
    step = max(1, stage_bytes // (row.element_size() * world_size))
    for start in range(0, max(1, row.numel()), step):
        yield slice(start, min(start + step, row.numel()))


def _copy_to(source: torch.Tensor, stage: torch.Tensor) -> None:
    stage.copy_(source)


def _copy_rows(source: torch.Tensor, stage: torch.Tensor) -> None:
    stage.view(source.shape).copy_(source)
