"""The halves of an all-reduce between two tensors, as torch.distributed asks for them, in every form that a plan needs.

`Group` works in place on one tensor. Here it is two, flat and contiguous: `whole`, of which each rank has an equal
part, and this rank's `part`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from mimatrix.collectives.schedule import Collective
from mimatrix.comm.calls import CollectiveOp
from mimatrix.comm.execution import staging as stages

InPlace = Callable[[torch.Tensor], None]
_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


@dataclass(frozen=True)
class AllGatherInto:
    """Every rank ends with the parts of all in `whole`."""

    whole: torch.Tensor
    part: torch.Tensor
    rank: int
    world_size: int

    @cached_property
    def kind(self) -> CollectiveOp:
        """What is asked for."""
        return CollectiveOp(Collective.ALL_GATHER, self.whole.dtype)

    def pieces(self, stage_bytes: int) -> Iterator[stages.StagedChunk]:
        """Over windows."""
        return stages.gather_pieces(self.whole, self.part, self.rank, self.world_size, stage_bytes)

    def native(self, backend: Any) -> None:
        """By a c10d backend."""
        backend._allgather_base(self.whole, self.part).wait()

    def in_place(self, run: InPlace) -> None:
        """By whatever gathers in place."""
        self.whole.view(self.world_size, -1)[self.rank].copy_(self.part)
        run(self.whole)


@dataclass(frozen=True)
class ReduceScatterInto:
    """Every rank ends with the sum (average, largest, least) of its part of `whole` in `part`."""

    part: torch.Tensor
    whole: torch.Tensor
    op: str
    rank: int
    world_size: int

    @cached_property
    def kind(self) -> CollectiveOp:
        """What is asked for."""
        return CollectiveOp(Collective.REDUCE_SCATTER, self.whole.dtype, self.op)

    def pieces(self, stage_bytes: int) -> Iterator[stages.StagedChunk]:
        """Over windows."""
        return stages.scatter_pieces(self.part, self.whole, self.rank, self.world_size, stage_bytes)

    def native(self, backend: Any) -> None:
        """By a c10d backend; not all of them know averages."""
        options = dist.ReduceScatterOptions()
        options.reduceOp = _OPS[self.op]
        backend._reduce_scatter_base(self.part, self.whole, options).wait()
        if self.op == "avg":
            self.part.div_(self.world_size)

    def in_place(self, run: InPlace) -> None:
        """By whatever scatters in place, in a copy since `whole` is the caller's."""
        copy = self.whole.clone()
        run(copy)
        self.part.copy_(copy.view(self.world_size, -1)[self.rank])
