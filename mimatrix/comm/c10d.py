"""The collectives of a c10d backend (Gloo, NCCL), in the flat form in which ours work."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mimatrix.collectives.schedule import Collective
from mimatrix.comm.execution.reduce import divide

_REDUCE_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def reduce_op_name(op: Any) -> str | None:
    """Return our name of a `ReduceOp`, or None if only c10d has it. They compare equal but do not hash."""
    return next((name for name, reduce_op in _REDUCE_OPS.items() if op == reduce_op), None)


class C10dBackend:
    """Runs collectives of one group on `backend`, which is part of torch and has no stubs."""

    def __init__(self, backend: Any, rank: int, world_size: int, timeout_s: float) -> None:
        self.backend, self._rank, self._world_size = backend, rank, world_size
        self._timeout = timedelta(seconds=timeout_s)

    def run(self, collective: Collective, flat: torch.Tensor, reduce_op: str, root: int) -> None:
        """Run a collective in place on a flat tensor, of which each rank owns an equal shard."""
        size = flat.numel() // self._world_size
        shard = flat[self._rank * size : (self._rank + 1) * size]
        match collective:
            case Collective.ALL_REDUCE:
                options = dist.AllreduceOptions()
                options.reduceOp = _torch_op(reduce_op)
                self._finish(self.backend.allreduce([flat], options))
                self._average(flat, reduce_op)
            case Collective.BROADCAST:
                root_options = dist.BroadcastOptions()
                root_options.rootRank = root
                self._finish(self.backend.broadcast([flat], root_options))
            case Collective.REDUCE_SCATTER:
                result = torch.empty_like(shard)
                self.reduce_scatter_into(result, flat, reduce_op)
                shard.copy_(result)
            case Collective.ALL_GATHER:
                self.all_gather_into(flat, shard.clone())

    def all_gather_into(self, full: torch.Tensor, shard: torch.Tensor) -> None:
        """Gather the shards of all ranks into `full`."""
        self._finish(self.backend._allgather_base(full, shard))

    def reduce_scatter_into(self, shard: torch.Tensor, full: torch.Tensor, reduce_op: str) -> None:
        """Reduce `full` over all ranks and store this rank's shard of the result."""
        options = dist.ReduceScatterOptions()
        options.reduceOp = _torch_op(reduce_op)
        self._finish(self.backend._reduce_scatter_base(shard, full, options))
        self._average(shard, reduce_op)

    def max_over_ranks(self, figures: list[float]) -> list[float]:
        """Return for each figure the largest of all ranks: the same list on every rank."""
        maxima = torch.tensor(figures, dtype=torch.float64)
        self.run(Collective.ALL_REDUCE, maxima, "max", 0)
        return [float(figure) for figure in maxima]

    def _average(self, total: torch.Tensor, reduce_op: str) -> None:
        if reduce_op == "avg":
            divide(total, self._world_size)

    def _finish(self, work: Any) -> None:
        work.wait(self._timeout)


def _torch_op(name: str) -> Any:
    # Gloo has no average: its sums are divided afterwards.
    return _REDUCE_OPS["sum" if name == "avg" else name]
