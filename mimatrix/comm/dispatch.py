"""Which code carries a collective: staged, in place, over shared storage, by send and receive, or by c10d.

Tensors in the arena are reduced in place, others pass through staging slots or are shared with peers where they lie.
NCCL's collectives are launched, and a GPU puts them in order; all others run on the calling thread until they are done.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

import torch

from mimatrix.collectives.catalog import Request, build
from mimatrix.collectives.compose import grouped_by_owner
from mimatrix.collectives.schedule import Collective, Schedule
from mimatrix.collectives.shares import Shares
from mimatrix.comm.c10d import C10dBackend, Way, is_native
from mimatrix.comm.calls import CallSignature, CollectiveOp
from mimatrix.comm.control.call_log import CallLog
from mimatrix.comm.endpoint import Endpoint
from mimatrix.comm.execution import staging
from mimatrix.comm.execution.grouped_send_recv import GroupedSendRecvExecutor
from mimatrix.comm.execution.one_sided import OneSidedExecutor
from mimatrix.comm.execution.program import Compiler, Program
from mimatrix.comm.execution.remote_read import RemoteReadExecutor, RemoteWindow
from mimatrix.comm.execution.send_recv import SendRecvExecutor
from mimatrix.comm.execution.staging import PinnedBuffer, StagedChunk, StagingSlots
from mimatrix.comm.memory.arena import Slot
from mimatrix.comm.memory.memfd import MemfdWindow
from mimatrix.comm.out_of_place import OutOfPlace
from mimatrix.comm.sync import Release, Sync
from mimatrix.comm.sync.coordinator_sync import CoordinatorSync
from mimatrix.comm.sync.flag_sync import PAGE_BYTES, FlagSync
from mimatrix.comm.tuning.choice import LISTS, PADDED, SHARDED, AlgorithmChoice, Carriers, Transport
from mimatrix.comm.tuning.forecast import Forecast, forecast_for
from mimatrix.comm.work import SideStreamTask, StreamTask
from mimatrix.core.errors import UnsuitedError, WorldError

T = TypeVar("T")
logger = logging.getLogger(__name__)
_MAX_COMPILERS = 1024
_WAYS: dict[str, Way] = {LISTS.algorithm: "lists", PADDED.algorithm: "padded"}


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
        *,
        forecast: Forecast | None,
        timeout_s: float,
        lazy_release: bool,
    ) -> None:
        self.calls = calls
        """All calls of this group, by which ranks that make different ones are found."""
        self.endpoint, self.members, self.sync = endpoint, members, sync
        self.backends, self.forecast = backends, forecast
        self.rank, self.world_size = members.index(endpoint.rank), len(members)
        self.cpu_backend = backends.get("cpu")
        self.nccl = backends["cuda"] if "cuda" in backends and backends["cuda"].is_nccl else None
        """Carries collectives of GPU tensors, if every rank has a GPU of its own."""
        self.has_mixed_devices = len({endpoint.locations[rank].has_gpu for rank in members}) > 1
        self.is_one_host = len({endpoint.locations[rank].host for rank in members}) == 1
        self._executors, self._timeout_s, self._lazy_release = executors, timeout_s, lazy_release
        self._carriers: dict[tuple[Collective, str, torch.dtype], Carriers] = {}
        self._send_recv = (
            SendRecvExecutor(self.cpu_backend.backend, members, endpoint.control, timeout_s)
            if self.cpu_backend
            else None
        )
        self._grouped = GroupedSendRecvExecutor(self.nccl.backend, self.world_size) if self.nccl else None
        self._staging = StagingSlots(endpoint.arenas, self.world_size)
        self._pinned, self._pinned_shard = PinnedBuffer(), PinnedBuffer()
        self._broken = ""
        self._compilers: dict[tuple[Collective, AlgorithmChoice, Shares | None, int, int], Compiler] = {}

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
        sync = _open_sync(endpoint, name, ranks, timeout_s)
        executors = {kind: _open_executor(endpoint, kind, ranks, sync, timeout_s) for kind in _kinds(endpoint, ranks)}
        forecast = forecast_for(ranks, endpoint.world_size)
        return cls(
            endpoint,
            ranks,
            sync,
            executors,
            backends,
            CallLog(name, ranks, endpoint.control),
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
        return (*windows, "c10d") if self.is_one_host else (*windows, "send_recv", "c10d")

    def carriers(self, collective: Collective, device: str, dtype: torch.dtype) -> Carriers:
        """Return what can carry a message that lies on `device` on every rank."""
        key = (collective, device, dtype)
        if key not in self._carriers:
            nccl = self.nccl if device == "cuda" else None
            # Over a network, NCCL sends from GPU memory; windows of other hosts would be read through host memory.
            self._carriers[key] = Carriers(
                windows=bool(self._executors) and not (nccl and "remote" in self._executors),
                send_recv=self.cpu_backend is not None and not self.is_one_host,
                native=self.cpu_backend is not None and is_native(collective, dtype),
                native_lists=nccl is not None,
            )
        return self._carriers[key]

    def carrier(self, choice: AlgorithmChoice, tensor: torch.Tensor) -> str:
        """Return what carries a call, for counters: `windows`, `nccl`, `gloo`, `send_recv nccl`; of GPUs in detail."""
        if choice.transport == "windows":
            return f"{self.window_kind(tensor)} windows" if tensor.is_cuda else "windows"
        backend = self.nccl if self.nccl and tensor.is_cuda else self.cpu_backend
        name = backend.name if backend else "nothing"
        if tensor.is_cuda and not self.nccl:
            name = f"{name} (staged)"
        return name if choice.transport == "c10d" else f"send_recv {name}"

    @property
    def window_kinds(self) -> tuple[str, ...]:
        """The kinds of windows over which all members reach each other."""
        return tuple(self._executors)

    def window_kind(self, tensor: torch.Tensor) -> str:
        """Return the kind of window for a tensor: its GPU's if all ranks have one, otherwise the host's."""
        return "cuda" if tensor.is_cuda and "cuda" in self._executors else next(iter(self._executors), "host")

    def find_slot(self, tensor: torch.Tensor) -> tuple[str, Slot, int] | None:
        """Return the window kind, the slot and the offset of a tensor in an arena, or None if it is in none."""
        for window_kind in self._executors:
            if placed := self.endpoint.arenas[window_kind].slot_of(tensor):
                return (window_kind, *placed)
        return None

    def view_peer(self, member: int, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Return bytes [start, stop) of a member's host arena as a tensor over its memory."""
        return self._executors["host"].view_peer(member, start, stop, dtype)

    def allocate_staging(self, window_kind: str) -> None:
        """Allocate the staging slots now, before the arena fills up, instead of at their first use."""
        self._staging.get(window_kind, staging.CHUNK_BYTES[window_kind])

    def launches(self, tensor: torch.Tensor, choice: AlgorithmChoice) -> bool:
        """Return whether a call is launched, and then ordered by the GPU: NCCL carries it."""
        return self.nccl is not None and tensor.is_cuda and choice.transport != "windows"

    def execute(self, op: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice) -> None:
        """Run a collective in place on a tensor; of one that is launched, the current stream waits for the end."""
        if self.world_size == 1:
            return
        if self.launches(tensor, choice):
            self.launch(op, tensor, choice).wait()
        elif choice.transport == "c10d":
            self._run_guarded(op, partial(self._run_c10d, op, tensor, choice))
        elif choice.transport == "send_recv":
            self._run_guarded(op, partial(self._run_send_recv, op, tensor, choice))
        elif placed := self.find_slot(tensor):
            self._run_in_place(op, tensor.numel(), choice, *placed)
        else:
            self._run_staged(op, tensor, choice)

    def launch(self, op: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice) -> StreamTask:
        """Launch a collective of NCCL in place on a tensor, after what the caller has launched so far."""
        nccl = self.nccl
        assert nccl
        counts, way = self._shard_counts(op, tensor.numel()), _way(choice)

        def run(collective_on: Callable[[torch.Tensor], None]) -> None:
            flat = tensor.reshape(-1).contiguous()
            collective_on(flat)
            _copy_back(flat, tensor)

        if choice.transport == "send_recv":
            return self._guarded(
                op, partial(SideStreamTask, partial(run, partial(self._run_grouped, op, choice)), tensor)
            )
        is_plain = tensor.is_contiguous() and choice != PADDED and (op.reduce_op != "avg" or tensor.is_floating_point())
        if is_plain:
            return self._guarded(
                op,
                lambda: nccl.launch(op.collective, tensor.view(-1), op.reduce_op, op.root, counts, way)[0],
            )

        def on_flat(flat: torch.Tensor) -> None:
            nccl.run(op.collective, flat, op.reduce_op, op.root, counts, way)

        return self._guarded(op, partial(SideStreamTask, partial(run, on_flat), tensor))

    def execute_into(self, call: OutOfPlace, choice: AlgorithmChoice) -> None:
        """Run a collective between two tensors; of one that is launched, the current stream waits for the end."""
        if self.launches(call.full, choice):
            self.launch_into(call, choice).wait()
            return
        match choice.transport:
            case "windows":
                window_kind = self.window_kind(call.full)
                chunks = list(call.chunks(staging.CHUNK_BYTES[window_kind]))
                self._run_chunks(call.op, chunks, choice, window_kind)
            case "send_recv":
                call.run_in_place(lambda tensor: self.execute(call.op, tensor, choice))
            case "c10d":
                self._run_guarded(call.op, partial(self._run_c10d_into, call))

    def launch_into(self, call: OutOfPlace, choice: AlgorithmChoice) -> StreamTask:
        """Launch a collective of NCCL between two tensors, after what the caller has launched so far."""
        nccl, op = self.nccl, call.op
        assert nccl
        if choice.transport == "send_recv":
            on_full = partial(self._run_grouped, op, choice)
            return self._guarded(op, partial(SideStreamTask, partial(call.run_in_place, on_full), call.output))
        if op.reduce_op != "avg" or call.full.is_floating_point():
            return self._guarded(op, lambda: call.launch_c10d(nccl)[0])

        def run() -> None:
            work, finish = call.launch_c10d(nccl)
            work.wait()
            if finish:
                finish()

        return self._guarded(op, partial(SideStreamTask, run, call.output))

    def check_same_call(self, op: CollectiveOp, count: int, choice: AlgorithmChoice) -> None:
        """Wait for all members, compare their calls and raise if they differ: a barrier, or before a measurement."""
        if self.world_size == 1:
            return
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        self.sync.begin(CallSignature.of(op, count, choice), 0, 0)
        self.sync.wait(0, peers)
        self.sync.end([(peer, -1) for peer in peers])

    def share_storage(self, tensor: torch.Tensor) -> None:
        """Let peers read a tensor's memory in place from now on, although it is not in the arena.

        torch moves the memory, and a NumPy array over it would keep the old one. So this is only for tensors that no
        other library holds, such as DDP's buckets.
        """
        window = self.endpoint.arenas["host"].window if "host" in self._executors else None
        if isinstance(window, MemfdWindow):
            window.storages.share(tensor.untyped_storage())

    def close(self) -> None:
        """Release the staging slots. The flag page stays: a slow peer may still read this rank's progress there."""
        self._staging.close()

    def _run_guarded(self, op: CollectiveOp, task: Callable[[], None]) -> None:
        """Run a task that waits inside torch; if it fails because a rank was lost, raise an error that names it.

        If it fails for another reason, the group is broken: messages of the call may still be in flight.
        """
        if self._broken:
            raise WorldError(f"this group is broken: {self._broken}; create a new one")
        try:
            self._guarded(op, task)
        except Exception as error:
            self._broken = f"{op.collective.value} ended with {type(error).__name__}: {error}"
            self.endpoint.control.report_failure(self.members, op.collective.value, error)
            raise

    def _guarded(self, op: CollectiveOp, task: Callable[[], T]) -> T:
        """Return what a task of torch returns; if it fails because a rank was lost, raise an error that names it."""
        try:
            return task()
        except RuntimeError as error:
            self.explain(op, error)
            raise

    def explain(self, op: CollectiveOp, error: RuntimeError) -> None:
        """Raise an error that says why torch failed in a collective, if that is known: who is lost, or who differs."""
        logger.debug("%s failed in torch: %s", op.collective.value, error)
        self.calls.report()
        self.endpoint.control.diagnose(self.members, op.collective.value, self._timeout_s)

    def _run_c10d(self, op: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice) -> None:
        backend = self.cpu_backend
        assert backend
        counts, way = self._shard_counts(op, tensor.numel()), _way(choice)

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
        call, program = CallSignature.of(op, tensor.numel(), choice), self._program(op, choice, tensor.numel())
        self._run_on_host(lambda flat: executor.run(call, program, flat), tensor)

    def _run_grouped(self, op: CollectiveOp, choice: AlgorithmChoice, flat: torch.Tensor) -> None:
        assert self._grouped
        call = CallSignature.of(op, flat.numel(), choice)
        self._grouped.run(call, self._program(op, choice, flat.numel()), flat)

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
        _copy_back(flat, tensor)

    def _shard_counts(self, op: CollectiveOp, count: int) -> tuple[int, ...] | None:
        """Return how many elements of a sharded collective each rank owns; None if it is not sharded."""
        return (op.shares or Shares.equal(self.world_size)).cut(count) if op.collective in SHARDED else None

    def _run_in_place(
        self, op: CollectiveOp, count: int, choice: AlgorithmChoice, window_kind: str, slot: Slot, offset: int
    ) -> None:
        slot.wait_readers()
        call = CallSignature.of(op, count, choice)
        release = self._executors[window_kind].run(call, self._compiler(op, choice).program(count), offset)
        if self._lazy_release:
            slot.add_readers(partial(self.sync.wait_released, release))
        else:
            self.sync.wait_released(release)

    def _run_staged(self, op: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice) -> None:
        flat, window_kind = tensor.reshape(-1), self.window_kind(tensor)
        chunk_bytes = self._chunk_bytes(op, window_kind)
        if op.collective in SHARDED and flat.nbytes > chunk_bytes:
            counts = (op.shares or choice.shares or Shares.equal(self.world_size)).cut(flat.numel())
            for shares, chunks in staging.sharded_chunks(flat, counts, chunk_bytes):
                self._run_chunks(replace(op, shares=shares), chunks, choice, window_kind)
        elif (offset := self._shared_offset(flat)) is not None:
            self._run_shared_storage(op, flat, choice, offset)
        else:
            self._run_chunks(op, list(staging.chunks(flat, chunk_bytes)), choice, window_kind)
        _copy_back(flat, tensor)

    def _run_chunks(
        self, op: CollectiveOp, chunks: Sequence[StagedChunk], choice: AlgorithmChoice, window_kind: str
    ) -> None:
        """Run a collective chunk by chunk; the next chunk is staged while peers read this one."""
        slots = self._staging.get(window_kind, self._chunk_bytes(op, window_kind))
        executor, compiler = self._executors[window_kind], self._compiler(op, choice)
        may_be_direct = op.collective in (Collective.ALL_REDUCE, Collective.ALL_GATHER) and executor.maps_peers

        def fill(index: int) -> None:
            """Stage a whole chunk, or for a direct program only what peers read before it is reduced."""
            chunk, program = chunks[index], compiler.program(chunks[index].count)
            chunk.fill_slot(slots[index % len(slots)], op.dtype, program.direct if may_be_direct else None)

        fill(0)
        for index, chunk in enumerate(chunks):
            slot, program = slots[index % len(slots)], compiler.program(chunk.count)
            call = CallSignature.of(op, chunk.count, choice)
            meanwhile = partial(fill, index + 1) if index + 1 < len(chunks) else None
            outside = chunk.outside if program.direct is not None and may_be_direct else None
            release = executor.run(call, program, slot.offset, meanwhile, outside)
            if outside is None:
                chunk.drain(slot.tensor(op.dtype, chunk.count))
            slot.add_readers(partial(self.sync.wait_released, release))
        # The next call may come from another stream and fill the same slots.
        executor.synchronize()

    def _run_shared_storage(self, op: CollectiveOp, flat: torch.Tensor, choice: AlgorithmChoice, offset: int) -> None:
        """Run in place, in the same chunks as staged ranks do: each rank decides for its own side."""
        executor, compiler, size = self._executors["host"], self._compiler(op, choice), flat.element_size()
        step = self._chunk_bytes(op, "host") // size
        release: Release = ()
        for start in range(0, flat.numel(), step):
            chunk = flat[start : start + step]
            call = CallSignature.of(op, chunk.numel(), choice)
            release = executor.run(call, compiler.program(chunk.numel()), offset + start * size, within=chunk)
        self.sync.wait_released(release)  # readers that released the last chunk have released all

    def _shared_offset(self, flat: torch.Tensor) -> int | None:
        """Return where peers find a tensor whose storage is shared, or None if it is not."""
        is_on_host = self.window_kind(flat) == "host" and not flat.is_cuda
        window = self.endpoint.arenas["host"].window if is_on_host else None
        if not isinstance(window, MemfdWindow):
            return None
        first = window.storages.offset_of(flat.untyped_storage())
        return None if first is None else first + int(flat.storage_offset()) * flat.element_size()

    def _chunk_bytes(self, op: CollectiveOp, window_kind: str) -> int:
        """Return how much of a tensor outside the arena is worked on at a time; the same on all ranks."""
        # Where some ranks have GPUs, whose autograd has threads of its own, not all ranks see that it is a bucket.
        is_bucket = op.is_bucket and window_kind == "host" and not self.has_mixed_devices
        return staging.BUCKET_CHUNK_BYTES if is_bucket else staging.CHUNK_BYTES[window_kind]

    def _program(self, op: CollectiveOp, choice: AlgorithmChoice, count: int) -> Program:
        return self._compiler(op, choice, count).program(count)

    def _compiler(self, op: CollectiveOp, choice: AlgorithmChoice, count: int | None = None) -> Compiler:
        shares = op.shares or choice.shares
        # Segments of shards are cut from the elements that a rank owns, so their schedule depends on the length.
        length = (count or 0) if choice.segments > 1 and op.collective in SHARDED else 0
        if count == 0:
            choice = replace(choice, segments=1)  # nothing to cut
        key = (op.collective, choice, shares, op.root, length)
        if key not in self._compilers:
            if len(self._compilers) >= _MAX_COMPILERS:
                self._compilers.clear()
            self._compilers[key] = Compiler(self._schedule(op, choice, shares, length), self.rank)
        return self._compilers[key]

    def _schedule(self, op: CollectiveOp, choice: AlgorithmChoice, shares: Shares | None, count: int) -> Schedule:
        """Return the schedule, fitted to the network if that is described and each rank may own any shard."""
        if self.forecast and op.collective is Collective.ALL_REDUCE and not op.shares:
            return self.forecast.schedule(choice, op.collective)
        request = Request(op.collective, self.world_size, shares=shares, segments=choice.segments, root=op.root)
        schedule = build(choice.algorithm, request)
        if count:
            schedule = grouped_by_owner(schedule, (shares or Shares.equal(self.world_size)).cut(count))
        is_in_order = list(schedule.owners) == sorted(schedule.owners)
        if op.collective in SHARDED and not (is_in_order and len(set(schedule.owners)) == self.world_size):
            raise UnsuitedError(f"{choice} does not leave each rank one shard in the order of ranks; use gdraa or ring")
        return schedule


def _way(choice: AlgorithmChoice) -> Way:
    return _WAYS.get(choice.algorithm, "equal")


def _kinds(endpoint: Endpoint, members: Sequence[int]) -> list[str]:
    """Return the kinds of windows over which all members reach each other."""
    locations = [endpoint.locations[rank] for rank in members]
    common = set(endpoint.window_kinds).intersection(*(location.windows for location in locations))
    reachable = {"host", "cuda"} if len({location.host for location in locations}) == 1 else {"remote"}
    if "cuda" in common & reachable and not endpoint.peer_access.is_mutual(members):
        reachable.remove("cuda")
    return sorted(common & reachable, reverse=True)


def _open_executor(
    endpoint: Endpoint, kind: str, members: Sequence[int], sync: Sync, timeout_s: float
) -> OneSidedExecutor:
    windows = [None if rank == endpoint.rank else endpoint.window(kind, rank) for rank in members]
    arena = endpoint.arenas[kind]
    if kind == "remote":
        remote = cast("list[RemoteWindow | None]", windows)
        return RemoteReadExecutor(arena, remote, sync, members, endpoint.control, timeout_s)
    return OneSidedExecutor(arena, windows, sync)


def _open_sync(endpoint: Endpoint, name: str, members: Sequence[int], timeout_s: float) -> Sync:
    """Return how the members wait for each other: by flags in mapped memory, or between hosts by the coordinator."""
    if "host" in _kinds(endpoint, members):
        return _open_flags(endpoint, name, members, timeout_s)
    return CoordinatorSync(name, members, endpoint.control, timeout_s)


def _open_flags(endpoint: Endpoint, name: str, members: Sequence[int], timeout_s: float) -> FlagSync:
    """Publish this rank's flag page and map those of all members."""
    own, store = members.index(endpoint.rank), endpoint.store
    page = endpoint.arenas["host"].allocate(PAGE_BYTES)
    page.bytes.zero_()
    store.set(f"mimatrix/group/{name}/{own}", str(page.offset))
    pages = []
    for member, rank in enumerate(members):
        offset = int(store.get(f"mimatrix/group/{name}/{member}"))
        mapped = page.bytes if member == own else endpoint.window("host", rank).view(offset, offset + PAGE_BYTES)
        assert mapped is not None
        pages.append(mapped.numpy().data.cast("B"))
    return FlagSync(own, pages, members, endpoint.control, timeout_s, group=name)


def _copy_back(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a result back to `tensor` if `reshape` had to copy."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))
