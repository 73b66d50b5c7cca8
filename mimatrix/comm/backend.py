# mypy: disable-error-code="override,misc,arg-type"
# torch's stubs of ProcessGroup and Work leave no room for subclasses in Python.
"""The c10d backend `mimatrix`: `torch.distributed.init_process_group("mimatrix")`.

A process group in Python with a c10d backend for each device in it. Collectives that are accelerated here run through
`Group`; all others go to the c10d backend. Both are counted, so that it is visible what carried a call.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from mimatrix.collectives.schedule import Collective
from mimatrix.comm.c10d import C10dBackend, reduce_op_name
from mimatrix.comm.calls import DTYPES, CollectiveOp
from mimatrix.comm.device_backends import create_backends, create_window_kinds
from mimatrix.comm.endpoint import Endpoint
from mimatrix.comm.endpoint_registry import acquire, agreed_name, fresh_prefix
from mimatrix.comm.group import Group
from mimatrix.comm.out_of_place import AllGatherInto, OutOfPlace, ReduceScatterInto
from mimatrix.comm.work import DiagnosedWork, StreamWork, TorchWork, Work
from mimatrix.core.errors import UserError

_C10D_ONLY = {
    "allgather_coalesced": "all_gather",
    "allreduce_coalesced": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "gather": "gather",
    "reduce": "reduce",
    "scatter": "scatter",
}
"""torch's names, and ours, by which calls are counted."""
_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_LOSS_NOTICE_S = 0.3
"""The news that a rank is lost may come a little after its connections have closed."""


class MiMatrixProcessGroup(dist.ProcessGroup):
    """One group of ranks, as torch.distributed sees it. torch calls the constructor on all ranks at once."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        store = fresh_prefix(store, size)
        self._backends, self.nccl_reason = create_backends(store, rank, size, timeout)
        types = dist.ProcessGroup.BackendType
        for device, backend in self._backends.items():
            self._register_backend(
                torch.device(device), types.NCCL if backend.name() == "nccl" else types.GLOO, backend
            )
        self._set_default_backend(types.GLOO)
        self.c10d_calls = Counter[str]()
        self._timeout_s = timeout.total_seconds()
        self._shared, members = acquire(store, rank, size, partial(create_window_kinds, store, rank, size))
        name = agreed_name(store, rank, "group")
        wrapped = {
            device: C10dBackend(backend, rank, size, self._timeout_s) for device, backend in self._backends.items()
        }
        self.mimatrix = Group.create(
            self._shared.endpoint,
            name,
            members,
            backends=wrapped,
            nccl_reason=self.nccl_reason,
            timeout_s=self._timeout_s,
        )
        self._can_overlap = _cores_per_rank(self._shared.endpoint) >= 2
        self._is_open = True

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Return torch's name of this backend."""
        return "mimatrix"

    def shutdown(self) -> None:
        """Close everything; `destroy_process_group` calls this on every rank."""
        if self._is_open:
            self._is_open = False
            self.mimatrix.close()
            self._shared.release()
            super().shutdown()

    def abort(self) -> None:
        """Close everything; in `shutdown` no rank waits for another without a deadline."""
        self.shutdown()

    @property
    def counters(self) -> dict[str, int]:
        """Calls by collective and what carried them: `all_reduce windows`, `all_reduce nccl`, `send gloo`."""
        return dict(self.mimatrix.counters + self.c10d_calls)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Reduce by sum, average, maximum or minimum; c10d carries other operations.

        The average of integers is their sum divided and rounded towards zero, as with NCCL.
        """
        reduce_op = _reduce_op(opts)
        if tensors[0].is_cuda and reduce_op is not None and len(tensors) == 1:
            op = _cached_op(Collective.ALL_REDUCE, tensors[0].dtype, reduce_op)
            if launched := self.mimatrix.launch_known(op, tensors[0], is_async=not _waits(opts)):
                return launched
        if reduce_op is None or not _are_supported(*tensors) or len(tensors) > 1:
            return self._delegate("all_reduce", "allreduce", tensors, *_given(opts))
        # Called by the backward pass itself, with no Python between: only DDP does that, for its buckets.
        caller = sys._getframe().f_back
        is_bucket = caller is not None and caller.f_code is _BACKWARD and not tensors[0].is_cuda
        op = CollectiveOp(Collective.ALL_REDUCE, tensors[0].dtype, reduce_op, is_bucket=is_bucket)
        return self._start(op, tensors[0], opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Copy the root's tensor to all ranks."""
        if not _are_supported(*tensors) or len(tensors) > 1:
            return self._delegate("broadcast", "broadcast", tensors, *_given(opts))
        op = CollectiveOp(Collective.BROADCAST, tensors[0].dtype, root=opts.rootRank if opts else 0)
        return self._start(op, tensors[0], opts)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> dist.Work:
        """Gather the shards of all ranks into one tensor; this is torch 2.13's name of `_allgather_base`."""
        return self._all_gather(output, source, opts)

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> dist.Work:
        return self._all_gather(output, source, opts)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> dist.Work:
        """Reduce this rank's shard of one tensor; this is torch 2.13's name of `_reduce_scatter_base`."""
        return self._reduce_scatter(output, source, opts)

    def _reduce_scatter_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> dist.Work:
        return self._reduce_scatter(output, source, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Gather several tensors at once, as functional collectives and DTensor do."""
        return _last(self._all_gather(*both, opts) for both in zip(outputs, sources, strict=True))

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduce and scatter several tensors at once, as functional collectives and DTensor do."""
        return _last(self._reduce_scatter(*both, opts) for both in zip(outputs, sources, strict=True))

    def allgather(self, outputs: list[list[torch.Tensor]], sources: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Gather into a list of tensors, which may differ in size; c10d carries it."""
        return self._delegate("all_gather", "allgather", outputs, sources, *_given(opts))

    def reduce_scatter(
        self, outputs: list[torch.Tensor], sources: list[list[torch.Tensor]], opts: Any = None
    ) -> dist.Work:
        """Reduce and scatter a list of tensors; c10d carries it."""
        return self._delegate("reduce_scatter", "reduce_scatter", outputs, sources, *_given(opts))

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait until every rank has called this."""
        self.mimatrix.counters[f"barrier {'windows' if self.mimatrix.has_windows else 'send_recv'}"] += 1
        return TorchWork(self.mimatrix.start_barrier(wait=_waits(opts)), [])

    def _all_gather(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> dist.Work:
        if not _are_flat(output, source):
            return self._delegate("all_gather", "_allgather_base", output, source, *_given(opts))
        op = _cached_op(Collective.ALL_GATHER, output.dtype, "sum")
        is_async = not _waits(opts)
        if output.is_cuda and (launched := self.mimatrix.launch_known(op, output, source, is_async=is_async)):
            return launched
        call = AllGatherInto(
            full=_as_supported(output), shard=_as_supported(source), rank=self.rank(), world_size=self.size()
        )
        return self._start_into(call, opts, output)

    def _reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> dist.Work:
        reduce_op = _reduce_op(opts)
        if reduce_op is None or not _are_supported(output, source) or not _are_flat(output, source):
            return self._delegate("reduce_scatter", "_reduce_scatter_base", output, source, *_given(opts))
        op = _cached_op(Collective.REDUCE_SCATTER, source.dtype, reduce_op)
        is_async = not _waits(opts)
        if source.is_cuda and (launched := self.mimatrix.launch_known(op, source, output, is_async=is_async)):
            return launched
        call = ReduceScatterInto(
            shard=output.view(-1),
            full=source.view(-1),
            reduce_op=reduce_op,
            rank=self.rank(),
            world_size=self.size(),
        )
        return self._start_into(call, opts, output)

    def _start(self, op: CollectiveOp, tensor: torch.Tensor, opts: Any) -> dist.Work:
        # DDP waits at the end of the same backward pass: without a spare core, running here beats taking turns.
        may_run_here = _waits(opts) or (op.is_bucket and not self._can_overlap)
        return _as_torch_work(self.mimatrix.start(op, tensor, may_run_here=may_run_here), [tensor])

    def _start_into(self, call: OutOfPlace, opts: Any, output: torch.Tensor) -> dist.Work:
        return _as_torch_work(self.mimatrix.start_into(call, may_run_here=_waits(opts)), [output])

    def _delegate(self, word: str, name: str, *arguments: Any, **named: Any) -> dist.Work:
        """Call the c10d backend in the order of this group's collectives: backends pair calls by their number."""
        tensors = _tensors(arguments)
        is_launched = bool(tensors) and self.mimatrix.launches(tensors[0])
        # Where NCCL launches nothing, as in a group of one rank, Gloo has the tensors' copies on the host.
        backend = self._backend_of(tensors) if is_launched else self._backends["cpu"]
        self.c10d_calls[f"{word} {backend.name().lower()}"] += 1
        call = partial(getattr(backend, name), *arguments, **named)
        if is_launched:
            return _as_torch_work(self.mimatrix.launch_native(call, tensors[0], doing=word), tensors)
        if any(tensor.is_cuda for tensor in tensors):
            # Gloo sends from host memory only.
            call = partial(_run_on_host, getattr(backend, name), arguments, named)
        task = partial(self._run_c10d, word, call)
        return TorchWork(self.mimatrix.queue.submit(task, tensors[0], doing=word, inline=False), tensors)

    def _backend_of(self, tensors: list[torch.Tensor]) -> Any:
        return self._backends[tensors[0].device.type if tensors else "cpu"]

    def _run_c10d(self, word: str, call: Callable[[], dist.Work]) -> None:
        others = [member for member in range(self.size()) if member != self.rank()]
        DiagnosedWork(call(), partial(self._diagnose, word, others)).wait()

    def _diagnose(self, word: str, others: Iterable[int], error: RuntimeError) -> None:
        """Raise an error that names the lost rank, after a c10d call with `others` failed; also if that rank left."""
        control, members = self.mimatrix.endpoint.control, self.mimatrix.members
        doing, until = f"{word} ({str(error).splitlines()[0]})", time.monotonic() + _LOSS_NOTICE_S
        while time.monotonic() < until:
            for other in others:
                control.check(members[other], members, doing)
            time.sleep(0.02)
        control.diagnose(members, doing, self._timeout_s)


def _c10d_method(name: str, word: str) -> Callable[..., dist.Work]:
    def method(self: MiMatrixProcessGroup, *arguments: Any, **named: Any) -> dist.Work:
        return self._delegate(word, name, *arguments, **named)

    return method


def _point_to_point_method(name: str) -> Callable[..., dist.Work]:
    """Return a method that is not in the order of collectives: the other rank may call it in another order."""

    def method(self: MiMatrixProcessGroup, tensors: list[torch.Tensor], *more: int) -> dist.Work:
        backend = self._backend_of(tensors)
        if tensors[0].is_cuda and not self.mimatrix.has_nccl:
            raise UserError(
                f"{name} of a GPU's tensor needs NCCL, and {self.nccl_reason}; {name} tensor.cpu() instead, or use "
                "a collective"
            )
        self.c10d_calls[f"{name} {backend.name().lower()}"] += 1
        work: dist.Work = getattr(backend, name)(tensors, *more)
        other = more[:1] if name != "recv_anysource" else ()
        return DiagnosedWork(work, partial(self._diagnose, name, other))

    return method


for _name, _word in _C10D_ONLY.items():
    setattr(MiMatrixProcessGroup, _name, _c10d_method(_name, _word))
for _name in ("send", "recv", "recv_anysource"):
    setattr(MiMatrixProcessGroup, _name, _point_to_point_method(_name))


@lru_cache
def _cached_op(collective: Collective, dtype: torch.dtype, reduce_op: str) -> CollectiveOp:
    return CollectiveOp(collective, dtype, reduce_op)


def _reduce_op(opts: Any) -> str | None:
    """Return our name of the reduction, or None if we do not have it."""
    return reduce_op_name(opts.reduceOp if opts else dist.ReduceOp.SUM)


def _as_torch_work(work: Work, result: list[torch.Tensor]) -> dist.Work:
    """Return a work as torch knows it; NCCL's own as it is, since torch waits for it without the host."""
    if isinstance(work, StreamWork):
        if work.error:
            raise work.error
        if isinstance(work.launched, dist.Work):
            return work.launched
    return TorchWork(work, result)


def _waits(opts: Any) -> bool:
    """Whether the caller waits at once; torch leaves `asyncOp` out where it does not know."""
    return getattr(opts, "asyncOp", True) is False


def _are_supported(*tensors: torch.Tensor) -> bool:
    """Whether all tensors are dense and of the types that we reduce."""
    return all(tensor.dtype in DTYPES and tensor.layout is torch.strided for tensor in tensors)


def _are_flat(*tensors: torch.Tensor) -> bool:
    """Whether all tensors are contiguous and of the same type."""
    return all(tensor.is_contiguous() and tensor.dtype == tensors[0].dtype for tensor in tensors)


def _as_supported(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of a type that we carry; data that are only copied may be of any type."""
    flat = tensor.view(-1)
    return flat if tensor.dtype in DTYPES else flat.view(torch.uint8)


def _cores_per_rank(endpoint: Endpoint) -> float:
    """Return how many of this host's cores there are for each of its ranks."""
    host = endpoint.locations[endpoint.rank].host
    return len(os.sched_getaffinity(0)) / sum(location.host == host for location in endpoint.locations)


def _run_on_host(call: Callable[..., dist.Work], arguments: Iterable[Any], named: dict[str, Any]) -> dist.Work:
    """Make a call of c10d on copies in host memory, and copy them back; return its work, which is complete."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def staged(argument: Any) -> Any:
        if isinstance(argument, list):
            return [staged(part) for part in argument]
        if not isinstance(argument, torch.Tensor):
            return argument
        pairs.append((argument, argument.cpu()))
        return pairs[-1][1]

    work = call(*[staged(argument) for argument in arguments], **named)
    work.wait()
    for tensor, copy in pairs:
        tensor.copy_(copy)
    return work


def _tensors(arguments: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors in lists of lists."""
    tensors: list[torch.Tensor] = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            tensors.append(argument)
        elif isinstance(argument, list):
            tensors += _tensors(argument)
    return tensors


def _last(works: Iterable[dist.Work]) -> dist.Work:
    """Wait for all works but the last, so that their errors are raised here, and return the last."""
    started = list(works)
    for work in started[:-1]:
        work.wait()
    return started[-1]


def _given(opts: Any) -> tuple[Any, ...]:
    return () if opts is None else (opts,)
