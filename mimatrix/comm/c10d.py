"""The native collectives of a c10d backend, in the flat form in which ours work."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mimatrix.collectives.schedule import Collective

_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


class C10dBackend:
    """Runs collectives of one group on `backend` (Gloo, NCCL), which is part of torch and has no stubs."""

    def __init__(self, backend: Any, rank: int, world_size: int, timeout_s: float) -> None:
        self.backend, self._rank, self._world_size = backend, rank, world_size
        self._timeout = timedelta(seconds=timeout_s)

    def run(self, collective: Collective, flat: torch.Tensor, op: str, root: int) -> None:
        """In place on a flat tensor, as `Group` does it."""
        each = flat.numel() // self._world_size
        part = flat[self._rank * each : (self._rank + 1) * each]
        match collective:
            case Collective.ALL_REDUCE:
                options = dist.AllreduceOptions()
                options.reduceOp = _OPS[op]
                self._finish(self.backend.allreduce([flat], options))
            case Collective.BROADCAST:
                root_options = dist.BroadcastOptions()
                root_options.rootRank = root
                self._finish(self.backend.broadcast([flat], root_options))
            case Collective.REDUCE_SCATTER:
                scatter = dist.ReduceScatterOptions()
                scatter.reduceOp = _OPS[op]
                result = torch.empty_like(part)
                self._finish(self.backend._reduce_scatter_base(result, flat, scatter))
                part.copy_(result)
            case Collective.ALL_GATHER:
                self._finish(self.backend._allgather_base(flat, part.clone()))
        if op == "avg" and collective in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER):
            (flat if collective is Collective.ALL_REDUCE else part).div_(self._world_size)

    def slowest(self, seconds: list[float]) -> list[float]:
        """For each figure the largest of all ranks: the same list on every one."""
        figures = torch.tensor(seconds, dtype=torch.float64)
        self.run(Collective.ALL_REDUCE, figures, "max", 0)
        return [float(figure) for figure in figures]

    def _finish(self, work: Any) -> None:
        work.wait(self._timeout)
