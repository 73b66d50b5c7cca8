# mypy: disable-error-code="override,misc,arg-type"
# torch's stubs of ProcessGroup and Work leave no room for subclasses in Python.
"""The c10d backend `mimatrix`: `torch.distributed.init_process_group("mimatrix")`.

A process group in Python with the native backend of each device inside. What is accelerated here runs through `Group`;
everything else goes to the native backend, and both are counted, so that nobody believes in a path that did not run.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from mimatrix.collectives.schedule import Collective
from mimatrix.comm.c10d import C10dBackend
from mimatrix.comm.calls import DTYPES, CollectiveOp
from mimatrix.comm.endpoint import Endpoint, own_host
from mimatrix.comm.endpoint_registry import agreed_name, fresh_prefix, join
from mimatrix.comm.execution import staging as stages
from mimatrix.comm.group import Group, on_own_stream
from mimatrix.comm.memory import WindowKind
from mimatrix.comm.memory.cuda_ipc import CudaIpcWindows
from mimatrix.comm.memory.memfd import MemfdWindows
from mimatrix.comm.memory.nixl import NixlWindows, nixl_available
from mimatrix.comm.out_of_place import AllGatherInto, ReduceScatterInto
from mimatrix.comm.tuning.choice import C10D, AlgorithmChoice
from mimatrix.comm.work import Task, Work
from mimatrix.core.errors import UserError

_OPS = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "avg"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.MIN, "min"),
)
_NATIVE_ONLY = {
    "allgather_coalesced": "all_gather",
    "allreduce_coalesced": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "gather": "gather",
    "reduce": "reduce",
    "scatter": "scatter",
}
"""Torch's names and ours, by which calls are counted."""
_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_ADOPTED_BYTES = 1 << 18
"""Buckets of this size and more are read where they lie."""
_MOMENT_S = 0.3
"""News of a rank that is gone may come a little after its connections have closed."""


class MiMatrixProcessGroup(dist.ProcessGroup):
    """One group of ranks, as torch.distributed sees it."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        store = fresh_prefix(store, size)
        self._natives = _native_backends(store, rank, size, timeout)
        kinds = dist.ProcessGroup.BackendType
        for device, backend in self._natives.items():
            self._register_backend(
                torch.device(device), kinds.NCCL if backend.name() == "nccl" else kinds.GLOO, backend
            )
        self._set_default_backend(kinds.GLOO)
        self.native_calls = Counter[str]()
        self._timeout_s = seconds = timeout.total_seconds()
        self._joined, members = join(store, rank, size, partial(_kinds, store, rank, size))
        name = agreed_name(store, rank, "group")
        natives = {device: C10dBackend(backend, rank, size, seconds) for device, backend in self._natives.items()}
        self.mimatrix = Group(self._joined.endpoint, name, members, natives=natives, timeout_s=seconds)
        self._may_run_beside = _cores_for_each(self._joined.endpoint) >= 2
        self._is_open = True

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """How torch calls it."""
        return "mimatrix"

    def shutdown(self) -> None:
        """Let go of everything: `destroy_process_group` calls it, on every rank."""
        if self._is_open:
            self._is_open = False
            self.mimatrix.close()
            self._joined.leave()
            # Group and tuner know each other; without this Gloo's threads would stay until the next round of gc.
            self.mimatrix.tuner = None
            super().shutdown()

    def abort(self) -> None:
        """The same; no rank waits for another for ever in it."""
        self.shutdown()

    @property
    def counters(self) -> dict[str, int]:
        """Calls by collective and path: `all_reduce windows`, `all_reduce native`, `send native`."""
        return dict(self.mimatrix.counters + self.native_calls)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Sum, average, largest or least; other operations are native."""
        op = _op(opts)
        if op is None or not _suits(*tensors) or len(tensors) > 1:
            return self._pass_on("all_reduce", "allreduce", tensors, *_given(opts))
        # Called by the backward pass itself, with no Python between: only DDP does that, for its buckets.
        caller = sys._getframe().f_back
        bucket = caller is not None and caller.f_code is _BACKWARD and not tensors[0].is_cuda
        return self._whole(
            CollectiveOp(Collective.ALL_REDUCE, tensors[0].dtype, op, is_bucket=bucket), tensors[0], opts
        )

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """What the root has."""
        if not _suits(*tensors) or len(tensors) > 1:
            return self._pass_on("broadcast", "broadcast", tensors, *_given(opts))
        kind = CollectiveOp(Collective.BROADCAST, tensors[0].dtype, root=opts.rootRank if opts else 0)
        return self._whole(kind, tensors[0], opts)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> dist.Work:
        """The parts of all ranks behind one another: torch 2.13's name for it."""
        return self._gather(output, source, opts)

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> dist.Work:
        return self._gather(output, source, opts)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> dist.Work:
        """Every rank's part of the sum: torch 2.13's name for it."""
        return self._scatter(output, source, opts)

    def _reduce_scatter_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> dist.Work:
        return self._scatter(output, source, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Several at once: this is how functional collectives and DTensor come here."""
        return _last(self._gather(*both, opts) for both in zip(outputs, sources, strict=True))

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Several at once: this is how functional collectives and DTensor come here."""
        return _last(self._scatter(*both, opts) for both in zip(outputs, sources, strict=True))

    def allgather(self, outputs: list[list[torch.Tensor]], sources: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """The same into a list of tensors, which may differ in size; native."""
        return self._pass_on("all_gather", "allgather", outputs, sources, *_given(opts))

    def reduce_scatter(
        self, outputs: list[torch.Tensor], sources: list[list[torch.Tensor]], opts: Any = None
    ) -> dist.Work:
        """From a list of tensors; native."""
        return self._pass_on("reduce_scatter", "reduce_scatter", outputs, sources, *_given(opts))

    def barrier(self, opts: Any = None) -> dist.Work:
        """Back when every rank has come."""
        self.mimatrix.counters[f"barrier {'windows' if 'windows' in self.mimatrix.transports else 'send_recv'}"] += 1
        return _Handle(self.mimatrix.start_barrier(wait=getattr(opts, "asyncOp", True) is False), [])

    def _gather(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> dist.Work:
        if not _lie_flat(output, source):
            return self._pass_on("all_gather", "_allgather_base", output, source, *_given(opts))
        return self._through(AllGatherInto(_moved(output), _moved(source), self.rank(), self.size()), opts, output)

    def _scatter(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> dist.Work:
        op = _op(opts)
        if op is None or not _suits(output, source) or not _lie_flat(output, source):
            return self._pass_on("reduce_scatter", "_reduce_scatter_base", output, source, *_given(opts))
        return self._through(
            ReduceScatterInto(output.view(-1), source.view(-1), op, self.rank(), self.size()), opts, output
        )

    def _whole(self, kind: CollectiveOp, tensor: torch.Tensor, opts: Any) -> dist.Work:
        group = self.mimatrix
        group.check(kind, tensor)
        choice = group.cached_choice(kind, tensor)
        if kind.is_bucket and choice and choice.transport == "windows" and _fills_its_storage(tensor):
            group.adopt(tensor)

        def task() -> None:
            group.run(kind, tensor, choice or group.choose(kind, tensor))

        # DDP waits at the end of the same backward pass: where nothing can run beside it, better here than by turns.
        here = kind.is_bucket and not self._may_run_beside
        return self._submit(_described(kind, tensor), task, choice, opts, [tensor], here=here)

    def _through(self, half: AllGatherInto | ReduceScatterInto, opts: Any, output: torch.Tensor) -> dist.Work:
        """A half of an all-reduce, between two tensors: over windows through stages, otherwise as the plan says."""
        group, kind, whole = self.mimatrix, half.kind, half.whole
        if whole.numel() != half.part.numel() * self.size():
            raise UserError(
                f"{kind.collective.value} between {half.part.numel()} elements on each of {self.size()} ranks and "
                f"{whole.numel()} of all; give the larger tensor {half.part.numel() * self.size()}"
            )
        group.check(kind, whole)
        choice = group.cached_choice(kind, whole)

        def task() -> None:
            chosen, where = choice or group.choose(kind, whole), group.window_kind(whole)
            group.counters[f"{kind.collective.value} {chosen.transport}"] += 1
            match chosen.transport:
                case "windows":
                    group.run_pieces(kind, list(half.pieces(stages.STAGE_BYTES[where])), chosen, where=where)
                case "send_recv":
                    half.in_place(partial(group.perform, kind, choice=chosen))
                case "c10d":
                    group.check_same_call(kind, whole.numel(), C10D)
                    group.run_guarded(kind, partial(half.native, self._natives[whole.device.type]))

        return self._submit(_described(kind, whole), task, choice, opts, [output])

    def _submit(
        self,
        doing: str,
        task: Task,
        choice: AlgorithmChoice | None,
        opts: Any,
        result: list[torch.Tensor],
        *,
        here: bool = False,
    ) -> dist.Work:
        """In the order of this rank's collectives; on the caller's thread where it waits and can be interrupted."""
        waits = here or getattr(opts, "asyncOp", True) is False
        inline = choice is not None and choice.transport == "windows" and waits
        endpoint, members = self.mimatrix.endpoint, self.mimatrix.members
        work = Work(on_own_stream(task, result[0]), partial(endpoint.control.check, -1, members, doing))
        endpoint.thread.submit(work, inline=inline)
        return _Handle(work, result)

    def _pass_on(self, word: str, name: str, *arguments: Any, **named: Any) -> dist.Work:
        """To the native backend, in the order of this rank's collectives: Gloo pairs calls by their number."""
        self.native_calls[f"{word} c10d"] += 1
        tensors = _tensors(arguments)
        call = partial(getattr(self._native_of(tensors), name), *arguments, **named)
        return self._submit(word, partial(self._natively, word, call), C10D, None, tensors)

    def _native_of(self, tensors: list[torch.Tensor]) -> Any:
        return self._natives[tensors[0].device.type if tensors else "cpu"]

    def _natively(self, word: str, call: Callable[[], dist.Work]) -> None:
        others = [member for member in range(self.size()) if member != self.rank()]
        _Named(call(), partial(self._explain, word, others)).wait()

    def _explain(self, word: str, others: Iterable[int], error: RuntimeError) -> None:
        """Something native with `others` has failed: name the one that is gone, even if it left in good order."""
        control, members = self.mimatrix.endpoint.control, self.mimatrix.members
        doing, until = f"{word} ({str(error).splitlines()[0]})", time.monotonic() + _MOMENT_S
        while time.monotonic() < until:
            for other in others:
                control.check(members[other], members, doing)
            time.sleep(0.02)
        control.diagnose(members, doing, self._timeout_s)


def _native_method(name: str, word: str) -> Callable[..., dist.Work]:
    def method(self: MiMatrixProcessGroup, *arguments: Any, **named: Any) -> dist.Work:
        return self._pass_on(word, name, *arguments, **named)

    return method


def _between_two(name: str) -> Callable[..., dist.Work]:
    """From rank to rank; not in the order of collectives, since the other rank may come to it in another order."""

    def method(self: MiMatrixProcessGroup, tensors: list[torch.Tensor], *more: int) -> dist.Work:
        self.native_calls[f"{name} c10d"] += 1
        work: dist.Work = getattr(self._native_of(tensors), name)(tensors, *more)
        other = more[:1] if name != "recv_anysource" else ()
        return _Named(work, partial(self._explain, name, other))

    return method


for _name, _word in _NATIVE_ONLY.items():
    setattr(MiMatrixProcessGroup, _name, _native_method(_name, _word))
for _name in ("send", "recv", "recv_anysource"):
    setattr(MiMatrixProcessGroup, _name, _between_two(_name))


class _Handle(dist._Work):  # type: ignore[name-defined]
    """A `Work` of ours in torch's clothes."""

    def __init__(self, work: Work, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._work, self._result = work, result
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Back when it is done; raises what went wrong."""
        seconds = timeout.total_seconds() if timeout else 0.0
        self._work.wait(seconds or None)
        return True

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return self._work.is_done()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._work.is_done() and self._work.error is None

    def exception(self) -> Exception | None:
        """What went wrong."""
        return self._work.error

    def result(self) -> list[torch.Tensor]:
        """The tensors."""
        return self._result

    def get_future(self) -> "torch.futures.Future[list[torch.Tensor]]":
        """For those who chain work to it, as DDP does."""
        if self._future is None:
            ended: torch.futures.Future[None] = torch.futures.Future()
            # Only what a callback raises is an error for torch's own code too; `set_exception` hands it the exception
            # as the result, which DDP takes for tensors.
            self._future = ended.then(self._outcome)
            self._work.then(lambda _: ended.set_result(None))
        return self._future

    def _outcome(self, _: object) -> list[torch.Tensor]:
        if self._work.error:
            raise self._work.error
        return self._result


class _Named(dist._Work):  # type: ignore[name-defined]
    """Native work that names the rank that is gone when it fails."""

    def __init__(self, work: dist.Work, explain: Callable[[RuntimeError], None]) -> None:
        super().__init__()
        self._work, self._explain = work, explain

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Back when it is done; raises what went wrong."""
        try:
            return self._work.wait(timeout) if timeout else self._work.wait()
        except RuntimeError as error:
            self._explain(error)
            raise

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._work.is_success()

    def exception(self) -> Any:
        """What went wrong."""
        return self._work.exception()

    def _source_rank(self) -> int:
        return self._work._source_rank()


def _described(kind: CollectiveOp, tensor: torch.Tensor) -> str:
    return f"{kind.collective.value} of {tensor.numel()} {str(kind.dtype).removeprefix('torch.')}"


def _op(opts: Any) -> str | None:
    """Our word for the operation, if we have it. Torch's compare equal but do not hash."""
    wanted = opts.reduceOp if opts else dist.ReduceOp.SUM
    return next((name for op, name in _OPS if wanted == op), None)


def _suits(*tensors: torch.Tensor) -> bool:
    """Whether we take them: the usual types, dense."""
    return all(tensor.dtype in DTYPES and tensor.layout is torch.strided for tensor in tensors)


def _lie_flat(*tensors: torch.Tensor) -> bool:
    """Whether their elements lie one behind the other, all of the same type."""
    return all(tensor.is_contiguous() and tensor.dtype == tensors[0].dtype for tensor in tensors)


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    """Whether it is all of some larger memory of the host's, as buckets are."""
    size = tensor.numel() * tensor.element_size()
    flat = tensor.dim() == 1 and tensor.is_contiguous()
    return flat and _ADOPTED_BYTES <= size == tensor.untyped_storage().nbytes()


def _cores_for_each(endpoint: Endpoint) -> float:
    """Of this host's cores, how many there are for each of its ranks."""
    here = endpoint.places[endpoint.rank].host
    return len(os.sched_getaffinity(0)) / sum(place.host == here for place in endpoint.places)


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    """Flat, of a type that we carry; what is only moved may be of any."""
    flat = tensor.view(-1)
    return flat if tensor.dtype in DTYPES else flat.view(torch.uint8)


def _tensors(arguments: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors in lists of lists."""
    found: list[torch.Tensor] = []
    for each in arguments:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, list):
            found += _tensors(each)
    return found


def _last(works: Iterable[dist.Work]) -> dist.Work:
    """Of several calls in order: the last is done when all are, unless one went wrong, which is raised here."""
    done = list(works)
    for work in done[:-1]:
        work.wait()
    return done[-1]


def _given(opts: Any) -> tuple[Any, ...]:
    return () if opts is None else (opts,)


def _native_backends(store: Store, rank: int, size: int, timeout: timedelta) -> dict[str, Any]:
    """By device: Gloo; for GPUs NCCL, where every rank has one of its own (it refuses two ranks on one GPU)."""
    gloo = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)
    if not torch.cuda.is_available():
        store.set(f"mimatrix/gpu/{rank}", "")
        return {"cpu": gloo}
    mine = torch.cuda.get_device_properties(torch.cuda.current_device())
    store.set(f"mimatrix/gpu/{rank}", f"{own_host()} {getattr(mine, 'uuid', rank)}")
    gpus = {store.get(f"mimatrix/gpu/{other}") for other in range(size)}
    if not dist.is_nccl_available() or len(gpus) < size or b"" in gpus:
        return {"cpu": gloo, "cuda": gloo}
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return {"cpu": gloo, "cuda": ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)}


def _kinds(store: Store, rank: int, size: int) -> dict[str, WindowKind]:
    """The windows that this process can have."""
    kinds: dict[str, WindowKind] = {"host": MemfdWindows()}
    if _is_spread(store, rank, size) and nixl_available():
        kinds["far"] = NixlWindows()
    if torch.cuda.is_available():
        kinds["cuda"] = CudaIpcWindows(torch.device("cuda", torch.cuda.current_device()))
    return kinds


def _is_spread(store: Store, rank: int, size: int) -> bool:
    """Whether the ranks are on several hosts."""
    store.set(f"mimatrix/host/{rank}", own_host())
    return len({store.get(f"mimatrix/host/{other}") for other in range(size)}) > 1
