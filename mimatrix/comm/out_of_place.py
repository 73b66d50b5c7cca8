"""All-gather and reduce-scatter between two tensors, as torch.distributed calls them, for every transport.

`Group` works in place on one tensor. Here there are two, flat and contiguous: `full`, of which each rank owns an equal
shard, and this rank's `shard`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from mimatrix.collectives.schedule import Collective
from mimatrix.comm.c10d import C10dBackend, Launched
from mimatrix.comm.calls import CollectiveOp
from mimatrix.comm.execution import staging
from mimatrix.comm.execution.staging import StagedChunk

InPlace = Callable[[torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class AllGatherInto:
    """Every rank ends with the shards of all ranks in `full`."""

    full: torch.Tensor
    shard: torch.Tensor
    rank: int
    world_size: int

    @cached_property
    def op(self) -> CollectiveOp:
        """The collective."""
        return CollectiveOp(Collective.ALL_GATHER, self.full.dtype)

    @property
    def output(self) -> torch.Tensor:
        """The tensor that is written."""
        return self.full

    @property
    def source(self) -> torch.Tensor:
        """The tensor that is read."""
        return self.shard

    def chunks(self, chunk_bytes: int) -> Iterator[StagedChunk]:
        """Yield the chunks in which it passes through staging slots."""
        return staging.all_gather_chunks(self.full, self.shard, self.rank, self.world_size, chunk_bytes)

    def launch_c10d(self, backend: C10dBackend) -> Launched:
        """Start it on a c10d backend."""
        return backend.all_gather_into(self.full, self.shard), None

    def run_in_place(self, run: InPlace) -> None:
        """Run it by `run`, which gathers in place."""
        self.full.view(self.world_size, -1)[self.rank].copy_(self.shard)
        run(self.full)


@dataclass(frozen=True, kw_only=True)
class ReduceScatterInto:
    """Every rank ends with its shard of the reduced `full` in `shard`."""

    shard: torch.Tensor
    full: torch.Tensor
    reduce_op: str
    rank: int
    world_size: int

    @cached_property
    def op(self) -> CollectiveOp:
        """The collective."""
        return CollectiveOp(Collective.REDUCE_SCATTER, self.full.dtype, self.reduce_op)

    @property
    def output(self) -> torch.Tensor:
        """The tensor that is written."""
        return self.shard

    @property
    def source(self) -> torch.Tensor:
        """The tensor that is read."""
        return self.full

    def chunks(self, chunk_bytes: int) -> Iterator[StagedChunk]:
        """Yield the chunks in which it passes through staging slots."""
        return staging.reduce_scatter_chunks(self.shard, self.full, self.rank, self.world_size, chunk_bytes)

    def launch_c10d(self, backend: C10dBackend) -> Launched:
        """Start it on a c10d backend."""
        return backend.reduce_scatter_into(self.shard, self.full, self.reduce_op)

    def run_in_place(self, run: InPlace) -> None:
        """Run it by `run`, which scatters in place, on a copy because `full` belongs to the caller."""
        copy = self.full.clone()
        run(copy)
        self.shard.copy_(copy.view(self.world_size, -1)[self.rank])


OutOfPlace = AllGatherInto | ReduceScatterInto
