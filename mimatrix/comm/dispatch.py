"""Which code carries a collective: windows, send and receive, both of them, or c10d.

NCCL's collectives are launched, and a GPU puts them in order; all others run on the calling thread until they are done.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from mimatrix.collectives.schedule import Collective
from mimatrix.collectives.shares import Shares
from mimatrix.comm.c10d import C10dBackend, is_native
from mimatrix.comm.calls import SHARDED, CallSignature, CollectiveOp
from mimatrix.comm.control.call_log import CallLog
from mimatrix.comm.endpoint import Endpoint
from mimatrix.comm.execution import staging
from mimatrix.comm.execution.mixed import MixedExecutor
from mimatrix.comm.execution.one_sided import OneSidedExecutor
from mimatrix.comm.execution.send_recv import SendRecvExecutor
from mimatrix.comm.execution.staging import PinnedBuffer, StagedChunk, copy_back
from mimatrix.comm.nccl_launcher import NcclLauncher
from mimatrix.comm.out_of_place import OutOfPlace
from mimatrix.comm.peer_windows import can_mix, common_window_kinds, hosts_of, open_executor, open_mixed, open_sync
from mimatrix.comm.program_cache import ProgramCache
from mimatrix.comm.sync import Sync
from mimatrix.comm.tuning.choice import AlgorithmChoice, Carriers, Transport
from mimatrix.comm.tuning.forecast import Forecast
from mimatrix.comm.tuning.known_cluster import find_cluster
from mimatrix.comm.window_calls import WindowCalls
from mimatrix.core.errors import UnsuitedError, WorldError

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Dispatcher:
    """Runs collectives of one group on the calling thread, each by the transport and algorithm that it is given."""

    def __init__(
        self,
        endpoint: Endpoint,
        members: tuple[int, ...],
        sync: Sync,
        executors: Mapping[str, OneSidedExecutor],
        backends: Mapping[str, C10dBackend],
        calls: CallLog,
        launches: CallLog,
        *,
        mixed: MixedExecutor | None,
        forecast: Forecast | None,
        timeout_s: float,
        lazy_release: bool,
    ) -> None:
        self.calls, self.launch_log = calls, launches
        """All native calls of this group, by which ranks that make different ones are found: those that run on its
        thread, and those that are launched on the caller's; each in the same order on all ranks."""
        self.endpoint, self.members, self.sync = endpoint, members, sync
        self.backends, self.forecast = backends, forecast
        self.rank, self.world_size = members.index(endpoint.rank), len(members)
        self.cpu_backend = backends.get("cpu")
        self._programs = ProgramCache(self.rank, hosts_of(endpoint, members), forecast)
        self.nccl = _find_nccl(backends, self._programs, self.world_size)
        """Carries collectives of GPU tensors, if every rank has a GPU of its own."""
        self.has_mixed_devices = len({endpoint.locations[rank].has_gpu for rank in members}) > 1
        self.is_one_host = len({endpoint.locations[rank].host for rank in members}) == 1
        self._executors, self._timeout_s, self._mixed = executors, timeout_s, mixed
        self.windows = WindowCalls(
            executors,
            endpoint.arenas,
            sync,
            self._programs,
            world_size=self.world_size,
            has_mixed_devices=self.has_mixed_devices,
            lazy_release=lazy_release,
        )
        self._carriers: dict[tuple[Collective, str, torch.dtype], Carriers] = {}
        self._send_recv = (
            SendRecvExecutor(self.cpu_backend.backend, members, endpoint.control, timeout_s)
            if self.cpu_backend
            else None
        )
        self._pinned, self._pinned_shard = PinnedBuffer(), PinnedBuffer()
        self._broken = ""

    @classmethod
    def open(
        cls,
        endpoint: Endpoint,
        name: str,
        members: Sequence[int],
        backends: Mapping[str, C10dBackend],
        *,
        timeout_s: float,
        lazy_release: bool,
    ) -> "Dispatcher":
        """Open the windows of all members; every member calls this with the same `name`."""
        ranks = tuple(members)
        sync = open_sync(endpoint, name, ranks, timeout_s)
        kinds = common_window_kinds(endpoint, ranks)
        executors = {kind: open_executor(endpoint, kind, ranks, sync, timeout_s) for kind in kinds}
        known = find_cluster(endpoint, name, ranks)
        forecast = Forecast(known, hosts_of(endpoint, ranks)) if known else None
        mixed = None
        if "cpu" in backends and can_mix(endpoint, ranks):
            mixed = open_mixed(endpoint, name, ranks, backends["cpu"].backend, timeout_s)
        return cls(
            endpoint,
            ranks,
            sync,
            executors,
            backends,
            CallLog(name, ranks, endpoint.control),
            CallLog(f"{name}/launched", ranks, endpoint.control),
            mixed=mixed,
            forecast=forecast,
            timeout_s=timeout_s,
            lazy_release=lazy_release,
        )

    @property
    def transports(self) -> tuple[Transport, ...]:
        """The transports that can carry data here."""
        windows: tuple[Transport, ...] = ("windows",) if self._executors else ()
        if not self.cpu_backend:
            return windows
        mixed: tuple[Transport, ...] = ("mixed",) if self._mixed else ()
        return (*windows, "c10d") if self.is_one_host else (*windows, *mixed, "send_recv", "c10d")

    def carriers(self, collective: Collective, device: str, dtype: torch.dtype) -> Carriers:
        """Return what can carry a message that lies on `device` on every rank."""
        key = (collective, device, dtype)
        if key not in self._carriers:
            nccl = self.nccl if self.nccl and device == self.nccl.device_type else None
            # Over a network, NCCL sends from GPU memory; windows of other hosts would be read through host memory.
            self._carriers[key] = Carriers(
                windows=bool(self._executors) and not (nccl and "remote" in self._executors),
                mixed=self._mixed is not None and not nccl,
                send_recv=self.cpu_backend is not None and not self.is_one_host,
                native=self.cpu_backend is not None and is_native(collective, dtype),
                native_lists=nccl is not None,
            )
        return self._carriers[key]

    def carrier(self, choice: AlgorithmChoice, tensor: torch.Tensor) -> str:
        """Return what carries a call, for counters: `windows`, `nccl`, `gloo`, `send_recv nccl`; of GPUs in detail."""
        if choice.transport == "windows":
            return f"{self.windows.window_kind(tensor)} windows" if tensor.is_cuda else "windows"
        if self.nccl and self.nccl.carries(tensor, choice):
            name = self.nccl.backend.name
        else:
            name = f"{self.cpu_backend.name if self.cpu_backend else 'nothing'}{' (staged)' if tensor.is_cuda else ''}"
        return name if choice.transport == "c10d" else f"{choice.transport} {name}"

    def launches(self, tensor: torch.Tensor, choice: AlgorithmChoice) -> bool:
        """Return whether a call is launched, and then ordered by the GPU: NCCL carries it."""
        return self.nccl is not None and self.nccl.carries(tensor, choice)

    def execute(self, op: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice) -> None:
        """Run a collective in place on a tensor; of one that is launched, the current stream waits for the end."""
        if self.world_size == 1:
            return
        doing = op.describe(tensor.numel())
        if self.nccl and self.nccl.carries(tensor, choice):
            self.guarded(doing, partial(self.nccl.launch, op, tensor, choice)).wait()
        elif choice.transport == "c10d":
            self._run_guarded(doing, partial(self._run_c10d, op, tensor, choice))
        elif choice.transport == "send_recv":
            self._run_guarded(doing, partial(self._run_send_recv, op, tensor, choice))
        elif choice.transport == "mixed":
            self._run_mixed(op, tensor, choice)
        elif placed := self.windows.find_slot(tensor):
            self.windows.run_in_place(op, tensor.numel(), choice, *placed)
        else:
            self.windows.run_staged(op, tensor, choice)

    def execute_into(self, call: OutOfPlace, choice: AlgorithmChoice) -> None:
        """Run a collective between two tensors; of one that is launched, the current stream waits for the end."""
        doing = call.op.describe(call.full.numel())
        if self.nccl and self.nccl.carries(call.full, choice):
            self.guarded(doing, partial(self.nccl.launch_into, call, choice)).wait()
            return
        match choice.transport:
            case "windows":
                window_kind = self.windows.window_kind(call.full)
                chunks = list(call.chunks(staging.CHUNK_BYTES[window_kind]))
                self.windows.run_chunks(call.op, chunks, choice, window_kind)
            case "send_recv" | "mixed":
                call.run_in_place(lambda tensor: self.execute(call.op, tensor, choice))
            case "c10d":
                self._run_guarded(doing, partial(self._run_c10d_into, call))

    def check_same_call(self, op: CollectiveOp, count: int, choice: AlgorithmChoice) -> None:
        """Wait for all members, compare their calls and raise if they differ: a barrier, or before a measurement."""
        if self.world_size == 1:
            return
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        self.sync.begin(CallSignature.of(op, count, choice), 0, 0)
        self.sync.wait(0, peers)
        self.sync.end([(peer, -1) for peer in peers])

    def close(self) -> None:
        """Release the staging slots. The flag page stays: a slow peer may still read this rank's progress there."""
        self.windows.close()
        if self._mixed:
            self._mixed.close()

    def guarded(self, doing: str, task: Callable[[], T]) -> T:
        """Return what a task of torch returns; if it fails because a rank was lost, raise an error that names it."""
        try:
            return task()
        except RuntimeError as error:
            self.explain(doing, error)
            raise

    def explain(self, doing: str, error: RuntimeError) -> None:
        """Raise an error that says why torch failed in a collective, if that is known: who is lost, or who differs."""
        logger.debug("%s failed in torch: %s", doing, error)
        self.calls.report()
        self.launch_log.report()
        self.endpoint.control.diagnose(self.members, doing, self._timeout_s)

    def _run_guarded(self, doing: str, task: Callable[[], None]) -> None:
        """Run a task that waits inside torch; if it fails because a rank was lost, raise an error that names it.

        If it fails for another reason, the group is broken: messages of the call may still be in flight.
        """
        if self._broken:
            raise WorldError(f"this group is broken: {self._broken}; create a new one")
        try:
            self.guarded(doing, task)
        except Exception as error:
            self._broken = f"{doing} ended with {type(error).__name__}: {error}"
            self.endpoint.control.report_failure(self.members, doing, error)
            raise

    def _run_c10d(self, op: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice) -> None:
        backend = self.cpu_backend
        assert backend
        counts, way = op.shard_counts(tensor.numel(), self.world_size), choice.way

        def run(flat: torch.Tensor) -> None:
            backend.run(op.collective, flat, op.reduce_op, op.root, counts, way)

        self._run_on_host(run, tensor)

    def _run_c10d_into(self, call: OutOfPlace) -> None:
        backend = self.cpu_backend
        assert backend
        staged = call
        if call.full.is_cuda:
            full, shard = self._pinned.like(call.full), self._pinned_shard.like(call.shard)
            staged = replace(call, full=full, shard=shard)
            staged.source.copy_(call.source)
        work, finish = staged.launch_c10d(backend)
        backend.wait(work)
        if finish:
            finish()
        if call.full.is_cuda:
            call.output.copy_(staged.output)

    def _run_send_recv(self, op: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice) -> None:
        executor = self._send_recv
        assert executor
        call = CallSignature.of(op, tensor.numel(), choice)
        program = self._programs.program(op, choice, tensor.numel())
        self._run_on_host(lambda flat: executor.run(call, program, flat), tensor)

    def _run_mixed(self, op: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice) -> None:
        """Run a collective chunk by chunk through the arena, where peers of this host read."""
        mixed, flat = self._mixed, tensor.reshape(-1)
        if mixed is None:
            raise UnsuitedError(f"{choice} needs several hosts, of which one has several ranks; use send_recv")
        chunks = list(self._mixed_chunks(op, flat, mixed.chunk_bytes))
        # All before any runs: what cannot run is refused on all ranks alike.
        programs = [self._programs.program(part, choice, chunk.count) for part, chunk in chunks]

        def run() -> None:
            for number, ((part, chunk), program) in enumerate(zip(chunks, programs, strict=True)):
                mixed.run_chunk(CallSignature.of(part, chunk.count, choice), program, chunk, number)

        self._run_guarded(op.describe(tensor.numel()), run)
        copy_back(flat, tensor)

    def _mixed_chunks(
        self, op: CollectiveOp, flat: torch.Tensor, chunk_bytes: int
    ) -> Iterator[tuple[CollectiveOp, StagedChunk]]:
        """Yield the chunks of a tensor, each with the collective that runs on it."""
        if op.collective in SHARDED and flat.nbytes > chunk_bytes:
            counts = (op.shares or Shares.equal(self.world_size)).cut(flat.numel())
            for shares, chunks in staging.sharded_chunks(flat, counts, chunk_bytes):
                yield from ((replace(op, shares=shares), chunk) for chunk in chunks)
        else:
            yield from ((op, chunk) for chunk in staging.chunks(flat, chunk_bytes))

    def _run_on_host(self, run: Callable[[torch.Tensor], None], tensor: torch.Tensor) -> None:
        """Run a collective of Gloo on a tensor; one on a GPU passes through pinned host memory."""
        flat = tensor.reshape(-1).contiguous()  # a column of a matrix is flat already, but not contiguous
        if tensor.is_cuda:
            staged = self._pinned.like(flat)
            staged.copy_(flat)
            run(staged)
            flat.copy_(staged)
        else:
            run(flat)
        copy_back(flat, tensor)


def _find_nccl(backends: Mapping[str, C10dBackend], programs: ProgramCache, world_size: int) -> NcclLauncher | None:
    """Return what launches NCCL's collectives, if NCCL is among the backends."""
    for device_type, backend in backends.items():
        if backend.is_nccl:
            return NcclLauncher(backend, device_type, programs, world_size)
    return None
