"""The collectives of a c10d backend (Gloo, NCCL), in the flat form in which ours work."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from mimatrix.collectives.schedule import Collective
from mimatrix.comm.calls import Way
from mimatrix.comm.execution.reduce import divide
from mimatrix.comm.work import StreamTask
from mimatrix.core.errors import UnsuitedError

_REDUCE_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_MOVES_ONLY = (Collective.ALL_GATHER, Collective.BROADCAST)
_REDUCED_TYPES = frozenset(
    (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    )
)
"""What Gloo and NCCL both reduce; they move any type, as bytes."""


Launched = tuple[StreamTask, Callable[[], None] | None]
"""A collective in flight, and what is to be done after it to have the result in its place."""

Launcher = Callable[..., dist.Work | None]
"""Launches a collective on its tensors; returns nothing if it runs on the caller's stream."""


def reduce_op_name(op: Any) -> str | None:
    """Return our name of a `ReduceOp`, or None if only c10d has it. They compare equal but do not hash."""
    return next((name for name, reduce_op in _REDUCE_OPS.items() if op == reduce_op), None)


def is_native(collective: Collective, dtype: torch.dtype) -> bool:
    """Return whether the backends have a collective for a type."""
    return collective in _MOVES_ONLY or dtype in _REDUCED_TYPES


class C10dBackend:
    """Runs collectives of one group on `backend`, which is part of torch and has no stubs."""

    def __init__(self, backend: Any, rank: int, world_size: int, timeout_s: float) -> None:
        self.backend, self._rank, self._world_size = backend, rank, world_size
        self._timeout = timedelta(seconds=timeout_s)
        self.name = str(backend.name()).lower()
        """`gloo` or `nccl`."""

    @property
    def is_nccl(self) -> bool:
        """Whether it is NCCL, whose collectives a GPU puts in order itself."""
        return self.name == "nccl"

    def run(
        self,
        collective: Collective,
        flat: torch.Tensor,
        reduce_op: str,
        root: int,
        counts: Sequence[int] | None = None,
        way: Way = "equal",
    ) -> None:
        """Run a collective in place on a flat tensor, of which each rank owns a shard: `counts`, by default equal."""
        work, finish = self.launch(collective, flat, reduce_op, root, counts, way)
        self.wait(work)
        if finish:
            finish()

    def launch(
        self,
        collective: Collective,
        flat: torch.Tensor,
        reduce_op: str,
        root: int,
        counts: Sequence[int] | None = None,
        way: Way = "equal",
    ) -> Launched:
        """Start a collective in place on a flat tensor; arguments as in `run`."""
        if collective in _MOVES_ONLY and flat.dtype not in _REDUCED_TYPES:
            flat, counts = flat.view(torch.uint8), counts and [count * flat.element_size() for count in counts]
        match collective:
            case Collective.ALL_REDUCE:
                return self._all_reduce(flat, reduce_op)
            case Collective.BROADCAST:
                options = dist.BroadcastOptions()
                options.rootRank = root
                return self.backend.broadcast([flat], options), None
        shards = self._shards(flat, counts)
        if way == "equal":
            return self._launch_equal(collective, flat, shards[self._rank], reduce_op)
        if way == "lists":
            return self._launch_lists(collective, shards, reduce_op)
        return self._launch_padded(collective, shards, reduce_op)

    def launcher(
        self, collective: Collective, dtype: torch.dtype, reduce_op: str, root: int, *, is_async: bool
    ) -> Launcher | None:
        """Return what launches a collective on any contiguous tensor of a type, if nothing is left to do after it.

        An all-gather is launched on the full tensor and the shard, and so is a reduce-scatter, with shards of one size.
        Without `is_async` it runs on the caller's stream, which would wait for it anyway, and not on NCCL's own.
        """
        if not self.is_nccl or dtype not in _REDUCED_TYPES or self._averaging(torch.empty(0, dtype=dtype), reduce_op):
            return None
        backend = self.backend
        match collective:
            case Collective.ALL_REDUCE:
                reduce_options = dist.AllreduceOptions()
                reduce_options.reduceOp, reduce_options.asyncOp = self._torch_op(reduce_op, dtype), is_async
                return lambda tensor: backend.allreduce([tensor], reduce_options)
            case Collective.BROADCAST:
                root_options = dist.BroadcastOptions()
                root_options.rootRank, root_options.asyncOp = root, is_async
                return lambda tensor: backend.broadcast([tensor], root_options)
            case Collective.ALL_GATHER:
                gather_options = AllgatherOptions()
                gather_options.asyncOp = is_async
                return lambda full, shard: backend._allgather_base(full, shard, gather_options)
            case Collective.REDUCE_SCATTER:
                options = dist.ReduceScatterOptions()
                options.reduceOp, options.asyncOp = self._torch_op(reduce_op, dtype), is_async
                return lambda full, shard: backend._reduce_scatter_base(shard, full, options)

    def all_gather_into(self, full: torch.Tensor, shard: torch.Tensor) -> StreamTask:
        """Start to gather the shards of all ranks into `full`."""
        work: StreamTask = self.backend._allgather_base(full, shard)
        return work

    def reduce_scatter_into(self, shard: torch.Tensor, full: torch.Tensor, reduce_op: str) -> Launched:
        """Start to reduce `full` over all ranks and to store this rank's shard of the result."""
        options = dist.ReduceScatterOptions()
        options.reduceOp = self._torch_op(reduce_op, shard.dtype)
        return self.backend._reduce_scatter_base(shard, full, options), self._averaging(shard, reduce_op)

    def max_over_ranks(self, figures: list[float]) -> list[float]:
        """Return for each figure the largest of all ranks: the same list on every rank."""
        maxima = torch.tensor(figures, dtype=torch.float64)
        self.run(Collective.ALL_REDUCE, maxima, "max", 0)
        return [float(figure) for figure in maxima]

    def wait(self, work: Any) -> None:
        """Wait for a collective; of NCCL's only the current stream waits."""
        # With a timeout NCCL would have the host wait too, in steps of a millisecond.
        work.wait() if self.is_nccl else work.wait(self._timeout)

    def _all_reduce(self, flat: torch.Tensor, reduce_op: str) -> Launched:
        options = dist.AllreduceOptions()
        options.reduceOp = self._torch_op(reduce_op, flat.dtype)
        return self.backend.allreduce([flat], options), self._averaging(flat, reduce_op)

    def _launch_equal(
        self, collective: Collective, flat: torch.Tensor, shard: torch.Tensor, reduce_op: str
    ) -> Launched:
        if collective is Collective.ALL_GATHER:
            return self.all_gather_into(flat, shard if self.is_nccl else shard.clone()), None
        if self.is_nccl:
            return self.reduce_scatter_into(shard, flat, reduce_op)
        result = torch.empty_like(shard)
        work, average = self.reduce_scatter_into(result, flat, reduce_op)
        return work, _in_turn(average, lambda: shard.copy_(result))

    def _launch_lists(self, collective: Collective, shards: list[torch.Tensor], reduce_op: str) -> Launched:
        own = shards[self._rank]
        if collective is Collective.ALL_GATHER:
            return self.backend.allgather([shards], [own]), None
        options = dist.ReduceScatterOptions()
        options.reduceOp = self._torch_op(reduce_op, own.dtype)
        return self.backend.reduce_scatter([own], [shards], options), self._averaging(own, reduce_op)

    def _launch_padded(self, collective: Collective, shards: list[torch.Tensor], reduce_op: str) -> Launched:
        own = shards[self._rank]
        padded = own.new_empty(self._world_size, max(shard.numel() for shard in shards))
        rows = [row[: shard.numel()] for row, shard in zip(padded, shards, strict=True)]
        if collective is Collective.ALL_GATHER:
            rows[self._rank].copy_(own)
            source = padded[self._rank] if self.is_nccl else padded[self._rank].clone()
            return self.all_gather_into(padded.view(-1), source), lambda: torch._foreach_copy_(shards, rows)
        torch._foreach_copy_(rows, shards)
        result = torch.empty_like(padded[self._rank])
        work, average = self.reduce_scatter_into(result, padded.view(-1), reduce_op)
        return work, _in_turn(average, lambda: own.copy_(result[: own.numel()]))

    def _shards(self, flat: torch.Tensor, counts: Sequence[int] | None) -> list[torch.Tensor]:
        if counts is None:
            if flat.numel() % self._world_size:
                raise UnsuitedError(f"{flat.numel()} elements are not {self._world_size} equal shards; give the counts")
            counts = [flat.numel() // self._world_size] * self._world_size
        ends = accumulate(counts)
        return [flat[end - count : end] for count, end in zip(counts, ends, strict=True)]

    def _torch_op(self, name: str, dtype: torch.dtype) -> Any:
        # Gloo has no average, and NCCL none of integers that rounds as ours does: their sums are divided afterwards.
        has_average = self.is_nccl and dtype.is_floating_point
        return _REDUCE_OPS["sum" if name == "avg" and not has_average else name]

    def _averaging(self, total: torch.Tensor, reduce_op: str) -> Callable[[], None] | None:
        if reduce_op != "avg" or (self.is_nccl and total.dtype.is_floating_point):
            return None
        return lambda: divide(total, self._world_size)


def _in_turn(first: Callable[[], None] | None, then: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        if first:
            first()
        then()

    return run
