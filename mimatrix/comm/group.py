"""A group of ranks that run collectives together: the whole job, or a part of it.

Tensors in the arena are worked on in place, others pass through stages. What runs is a plan: over windows, over
messages, or the native collective; chosen by the tuner unless it is given.
"""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import cast

import torch

from mimatrix.collectives.catalog import Request, build
from mimatrix.collectives.schedule import Collective, Schedule
from mimatrix.collectives.shares import Shares
from mimatrix.comm.c10d import C10dBackend
from mimatrix.comm.calls import DTYPES, OPS, CallSignature, CollectiveOp
from mimatrix.comm.endpoint import Endpoint
from mimatrix.comm.execution import staging as stages
from mimatrix.comm.execution.one_sided import OneSidedExecutor, Sync
from mimatrix.comm.execution.program import Compiler
from mimatrix.comm.execution.remote_read import RemoteReadExecutor, RemoteWindow
from mimatrix.comm.execution.send_recv import SendRecvExecutor
from mimatrix.comm.memory.arena import Slot
from mimatrix.comm.memory.memfd import MemfdWindow
from mimatrix.comm.sync.coordinator_sync import CoordinatorSync
from mimatrix.comm.sync.flag_sync import PAGE_BYTES, FlagSync, Release
from mimatrix.comm.tuning.choice import C10D, AlgorithmChoice, Transport, default_choice
from mimatrix.comm.tuning.forecast import forecast_for
from mimatrix.comm.tuning.tuner import SizeClass, Tuner
from mimatrix.comm.work import CollectiveThread, Task, Work
from mimatrix.core.errors import UnsuitedError, UserError, WorldError


class Group:
    """Some ranks of a job; each of them makes this object with the same `name` and `members`.

    `natives` are native collectives by the type of device; `cpu` is always among them, if there are any. With them
    collectives are tuned, unless `tune` is false; without them they run over windows. `lazily` lets calls on tensors in
    the arena end while peers may still read them: whoever writes to such a tensor calls `reuse` first. With a `worker`
    of its own a group waits for no other group's collectives.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        name: str,
        members: Sequence[int],
        *,
        natives: Mapping[str, C10dBackend] | None = None,
        timeout_s: float = 300.0,
        tune: bool = True,
        lazily: bool = False,
        thread: CollectiveThread | None = None,
    ) -> None:
        self.endpoint, self.name, self.members = endpoint, name, tuple(members)
        self.rank, self.world_size = self.members.index(endpoint.rank), len(self.members)
        self.natives = dict(natives or {})
        self.native, self.counters = self.natives.get("cpu"), Counter[str]()
        self.moved = Counter[str]()
        """Bytes of the tensors of all calls, by collective."""
        self.thread = thread or endpoint.thread
        self._timeout_s, self._lazily = timeout_s, lazily
        self._compilers: dict[tuple[Collective, AlgorithmChoice, Shares | None, int], Compiler] = {}
        self._stages: dict[tuple[str, int], list[Slot]] = {}
        self._pinned: list[Slot] = []
        self.sync = self._synchronisation()
        self._mixed = len({"cuda" in endpoint.places[rank].windows for rank in self.members}) > 1
        self._executors = {kind: self._executor(kind) for kind in self._common_windows()}
        self._messages = self._message_executor()
        self.forecast = forecast_for(self.members, endpoint.world_size)
        self.tuner = Tuner(self) if natives and tune else None
        # Nobody may be done and gone before all have opened its windows.
        self.barrier()

    @property
    def has_nccl(self) -> bool:
        """Whether GPUs' native collectives are NCCL's."""
        return "cuda" in self.natives and self.natives["cuda"].backend is not self.natives["cpu"].backend

    @property
    def transports(self) -> tuple[Transport, ...]:
        """The ways that data can take here."""
        far = len({self.endpoint.places[rank].host for rank in self.members}) > 1
        found: tuple[Transport, ...] = ("windows",) if self._executors else ()
        return (*found, "send_recv", "c10d") if self.native and far else (*found, "c10d") if self.native else found

    def empty(self, count: int, dtype: torch.dtype = torch.float32, kind: str = "host") -> torch.Tensor:
        """A tensor in the arena: collectives on it, or on parts of it, need no staging."""
        return self.endpoint.arenas[kind].allocate(count * dtype.itemsize).tensor(dtype, count)

    @property
    def has_windows(self) -> bool:
        """Whether ranks read one another's memory at all."""
        return bool(self._executors)

    def largest_free_bytes(self, kind: str = "host") -> int:
        """The most bytes that one tensor of the arena could have now."""
        return self.endpoint.arenas[kind].largest_free

    def allocate_staging(self, kind: str = "host") -> None:
        """Take the room for staging now, before others fill the arena; otherwise it is taken when it is needed."""
        self._two_stages(kind, stages.STAGE_BYTES[kind])

    @property
    def maps_peers(self) -> bool:
        """Whether ranks see one another's host memory in place."""
        return "host" in self._executors

    def arena_offset(self, tensor: torch.Tensor) -> int | None:
        """Where a tensor lies in the host arena, if it does: for peers that look there."""
        placed = self._placed(tensor)
        return placed[2] if placed and placed[0] == "host" else None

    def peer_tensor(self, member: int, place: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """What a member has at a place of its host arena, as it is whenever one looks. To be read only."""
        return self._executors["host"].peer_view(member, place, place + count * dtype.itemsize, dtype)

    def reuse(self, tensor: torch.Tensor) -> None:
        """Back when peers no longer read a tensor in the arena; only needed after a call with `lazily`."""
        if placed := self._placed(tensor):
            placed[1].reuse()

    def free(self, tensor: torch.Tensor) -> None:
        """Give a tensor from `empty` back to the arena."""
        if placed := self._placed(tensor):
            placed[1].free()

    def all_reduce(
        self, tensor: torch.Tensor, op: str = "sum", *, choice: AlgorithmChoice | None = None, wait: bool = True
    ) -> Work:
        """Every rank ends with the sum (average, largest, least) of all."""
        return self._start(CollectiveOp(Collective.ALL_REDUCE, tensor.dtype, op), tensor, choice, wait)

    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        *,
        shares: Shares | None = None,
        choice: AlgorithmChoice | None = None,
        wait: bool = True,
    ) -> Work:
        """Every rank ends with the sum in its own part of `tensor`, cut by `shares`; the rest is left undefined."""
        return self._start(CollectiveOp(Collective.REDUCE_SCATTER, tensor.dtype, op, shares), tensor, choice, wait)

    def all_gather(
        self,
        tensor: torch.Tensor,
        *,
        shares: Shares | None = None,
        choice: AlgorithmChoice | None = None,
        wait: bool = True,
    ) -> Work:
        """Every rank ends with all parts of `tensor`, cut by `shares`, each from its owner."""
        return self._start(CollectiveOp(Collective.ALL_GATHER, tensor.dtype, "sum", shares), tensor, choice, wait)

    def broadcast(
        self, tensor: torch.Tensor, root: int = 0, *, choice: AlgorithmChoice | None = None, wait: bool = True
    ) -> Work:
        """Every rank ends with what member `root` has."""
        return self._start(CollectiveOp(Collective.BROADCAST, tensor.dtype, "sum", root=root), tensor, choice, wait)

    def barrier(self) -> None:
        """Back when every rank has come here."""
        self.start_barrier(wait=True).wait()

    def start_barrier(self, *, wait: bool) -> Work:
        """The same beside the caller: done when every rank has come."""
        kind = CollectiveOp(Collective.BROADCAST, torch.uint8)
        return self.submit(partial(self.check_same_call, kind, 0, AlgorithmChoice("windows", "barrier")), inline=wait)

    def part(self, count: int, shares: Shares | None = None, member: int | None = None) -> range:
        """The elements of a tensor of `count` that a member (by default this rank) owns under `shares`."""
        sizes = (shares or Shares.equal(self.world_size)).cut(count)
        mine = self.rank if member is None else member
        return range(sum(sizes[:mine]), sum(sizes[: mine + 1]))

    def submit(self, task: Task, *, inline: bool) -> Work:
        """Run a task in the order of this rank's collectives; here and now if nothing is ahead and it may be."""
        work = Work(task, partial(self.endpoint.control.check, -1, self.members, "a collective under way"))
        self.thread.submit(work, inline=inline)
        return work

    def cached_choice(self, kind: CollectiveOp, tensor: torch.Tensor) -> AlgorithmChoice | None:
        """The plan for a call, if that needs no measuring."""
        if self.world_size == 1:
            return C10D
        if self.tuner and not kind.shares:
            return self.tuner.cached_choice(self.size_class(kind.collective, tensor))
        transport: Transport = "windows" if self._executors else "send_recv"
        size = tensor.numel() * tensor.element_size() if self._placed(tensor) else 0
        return default_choice(kind.collective, size, self.world_size, transport)

    def choose(self, kind: CollectiveOp, tensor: torch.Tensor) -> AlgorithmChoice:
        """The plan for a call; measured at the first of its size, on the worker's turn."""
        known = self.cached_choice(kind, tensor)
        if known is None:
            assert self.tuner
            # The real call first: while measuring, ranks that disagree would complain about the tuner's sizes.
            self.check_same_call(kind, tensor.numel(), AlgorithmChoice("windows", "to be measured"))
            known = self.tuner.choose(self.size_class(kind.collective, tensor))
        return known

    def size_class(self, collective: Collective, tensor: torch.Tensor) -> SizeClass:
        """With which other messages this one is tuned."""
        placed = self._placed(tensor)
        where = placed[0] if placed else self.window_kind(tensor)
        # What is a GPU's tensor on one rank is a CPU's on another, and all must tune at the same moment.
        device = "cpu" if self._mixed else tensor.device.type
        return SizeClass.of(collective, tensor, where, device, placed=placed is not None)

    def run(self, kind: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice) -> None:
        """Run a call here and now, and count it; for whoever is on the worker's turn already."""
        self.counters[f"{kind.collective.value} {choice.transport}"] += 1
        self.moved[kind.collective.value] += tensor.numel() * tensor.element_size()
        self.perform(kind, tensor, choice)

    def perform(self, kind: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice) -> None:
        """The same without counting, for measurements."""
        if self.world_size == 1:
            return
        if choice.transport == "c10d":
            self.run_guarded(kind, partial(self._run_native, kind, tensor))
        elif choice.transport == "send_recv":
            self.run_guarded(kind, partial(self._run_messages, kind, tensor, choice))
        elif placed := self._placed(tensor):
            self._run_in_place(kind, tensor.numel(), choice, *placed)
        else:
            self._run_staged(kind, tensor, choice)

    def run_pieces(
        self,
        kind: CollectiveOp,
        pieces: Sequence[stages.StagedChunk],
        choice: AlgorithmChoice,
        slots: Sequence[Slot] | None = None,
        where: str = "host",
    ) -> None:
        """Run a collective over windows, piece by piece; the next piece is filled in while this one is awaited."""
        turns = slots or self._two_stages(where, self._piece_bytes(kind, where))
        executor, compiler = self._executors[where], self._compiler(kind, choice)
        may_be_direct = kind.collective in (Collective.ALL_REDUCE, Collective.ALL_GATHER) and executor.sees_peers

        def fill(index: int) -> None:
            """Put a piece into its stage: all of it, or where sums go straight back outside what peers read of it."""
            piece, program = pieces[index], compiler.program(pieces[index].count)
            piece.fill_slot(turns[index % len(turns)], kind.dtype, program.direct if may_be_direct else None)

        fill(0)
        for index, piece in enumerate(pieces):
            slot, program = turns[index % len(turns)], compiler.program(piece.count)
            call = CallSignature.of(kind, piece.count, choice)
            meanwhile = partial(fill, index + 1) if index + 1 < len(pieces) else None
            outside = piece.outside if program.direct is not None and may_be_direct else None
            release = executor.run(call, program, slot.offset, meanwhile, outside)
            if outside is None:
                piece.drain(slot.tensor(kind.dtype, piece.count))
            slot.read_until(partial(self.sync.wait_released, release))
        # The next call may come from another stream and fill the same stages.
        executor.settle()

    def adopt(self, tensor: torch.Tensor) -> None:
        """Let peers read a tensor's memory in place from now on, although it is not in the arena.

        Torch moves the memory: whoever knows it by its address, as a NumPy array over it does, is left behind. For
        tensors that nobody else looks at so, as DDP's buckets.
        """
        window = self.endpoint.arenas["host"].window if "host" in self._executors else None
        if isinstance(window, MemfdWindow):
            window.adopted.adopt(tensor.untyped_storage())

    def check(self, kind: CollectiveOp, tensor: torch.Tensor) -> None:
        """Refuse what cannot be done, before any rank waits for another."""
        if kind.op not in OPS:
            raise UserError(f'there is no "{kind.op}" of tensors; use {", ".join(OPS)}')
        if tensor.dtype not in DTYPES:
            raise UserError(f"tensors of {tensor.dtype} are not summed; use float32 or another of the usual types")
        if kind.op == "avg" and not tensor.is_floating_point():
            raise UserError(f"the average of {tensor.dtype} is no whole number; use sum, or a floating-point type")
        if kind.shares and len(kind.shares) != self.world_size:
            raise UserError(f"got {len(kind.shares)} shares for {self.world_size} ranks; give one for each rank")
        if not 0 <= kind.root < self.world_size:
            raise UserError(f"the root is member {kind.root} of {self.world_size}; use 0 to {self.world_size - 1}")

    def close(self) -> None:
        """Give the stages back. The page stays: a slow peer may still look there for how far this rank has come."""
        _unpin(self._pinned)
        self._pinned.clear()
        for slot in (slot for slots in self._stages.values() for slot in slots):
            with suppress(WorldError):  # peers that are gone read nothing any more
                slot.reuse()
            slot.arena.take_back(slot)
        self._stages.clear()

    def run_guarded(self, kind: CollectiveOp, task: Task) -> None:
        """Run what waits inside torch: when it fails because a rank is gone, say which."""
        try:
            task()
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            self.endpoint.control.diagnose(self.members, f"{kind.collective.value} ({why})", self._timeout_s)
            raise

    def window_kind(self, tensor: torch.Tensor) -> str:
        """The windows that fit a tensor: its GPU's where all ranks have such, otherwise the host's."""
        return "cuda" if tensor.is_cuda and "cuda" in self._executors else next(iter(self._executors), "host")

    def _start(self, kind: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice | None, wait: bool) -> Work:
        self.check(kind, tensor)

        chosen = choice or self.cached_choice(kind, tensor)

        def task() -> None:
            self.run(kind, tensor, chosen or self.choose(kind, tensor))

        # Native collectives and messages cannot be interrupted, so they must not run on the thread that waits.
        inline = wait and chosen is not None and chosen.transport == "windows"
        work = self.submit(on_own_stream(task, tensor), inline=inline)
        if wait:
            work.wait()
        return work

    def _run_native(self, kind: CollectiveOp, tensor: torch.Tensor) -> None:
        assert self.native
        self.check_same_call(kind, tensor.numel(), C10D)
        flat = tensor.reshape(-1)
        native = self.natives.get(tensor.device.type, self.native)
        native.run(kind.collective, flat, kind.op, kind.root)
        _return(flat, tensor)

    def _run_messages(self, kind: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice) -> None:
        assert self._messages
        self.check_same_call(kind, tensor.numel(), choice)
        call = CallSignature.of(kind, tensor.numel(), choice)
        flat = tensor.reshape(-1)
        self._messages.run(call, self._compiler(kind, choice).program(tensor.numel()), flat)
        _return(flat, tensor)

    def _run_in_place(
        self, kind: CollectiveOp, count: int, choice: AlgorithmChoice, where: str, slot: Slot, offset: int
    ) -> None:
        slot.reuse()
        call = CallSignature.of(kind, count, choice)
        release = self._executors[where].run(call, self._compiler(kind, choice).program(count), offset)
        if self._lazily:
            slot.read_until(partial(self.sync.wait_released, release))
        else:
            self.sync.wait_released(release)

    def _run_staged(self, kind: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice) -> None:
        flat, where = tensor.reshape(-1), self.window_kind(tensor)
        room = self._piece_bytes(kind, where)
        cut = kind.collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
        if cut and flat.numel() * flat.element_size() > room:
            parts = (kind.shares or choice.shares or Shares.equal(self.world_size)).cut(flat.numel())
            for shares, pieces in stages.in_shared_pieces(flat, parts, room):
                self.run_pieces(replace(kind, shares=shares), pieces, choice, where=where)
        elif (place := self._adopted_place(flat)) is not None:
            self._run_adopted(kind, flat, choice, place)
        else:
            self.run_pieces(kind, list(stages.in_pieces(flat, room)), choice, where=where)
        _return(flat, tensor)

    def _run_adopted(self, kind: CollectiveOp, flat: torch.Tensor, choice: AlgorithmChoice, place: int) -> None:
        """In place, in the same pieces as by stages: each rank sees to its own side, whatever its peers do."""
        executor, compiler, size = self._executors["host"], self._compiler(kind, choice), flat.element_size()
        step = self._piece_bytes(kind, "host") // size
        release: Release = ()
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step]
            call = CallSignature.of(kind, piece.numel(), choice)
            release = executor.run(call, compiler.program(piece.numel()), place + start * size, within=piece)
        self.sync.wait_released(release)  # whoever has let go of the last piece has let go of all

    def _adopted_place(self, flat: torch.Tensor) -> int | None:
        """Where peers find an adopted tensor."""
        window = self.endpoint.arenas["host"].window if self.window_kind(flat) == "host" and not flat.is_cuda else None
        if not isinstance(window, MemfdWindow):
            return None
        first = window.adopted.place_of(flat.untyped_storage())
        return None if first is None else first + int(flat.storage_offset()) * flat.element_size()

    def check_same_call(self, kind: CollectiveOp, count: int, choice: AlgorithmChoice) -> None:
        """Before what cannot notice it by itself: do all ranks ask for the same?"""
        if self.world_size == 1:
            return
        call = CallSignature.of(kind, count, choice)
        self.sync.begin(call, 0, 0)
        self.sync.wait(0, [peer for peer in range(self.world_size) if peer != self.rank])
        self.sync.end([(peer, -1) for peer in range(self.world_size) if peer != self.rank])

    def _placed(self, tensor: torch.Tensor) -> tuple[str, Slot, int] | None:
        for where in self._executors:
            found = self.endpoint.arenas[where].slot_of(tensor)
            if found:
                return (where, *found)
        return None

    def _piece_bytes(self, kind: CollectiveOp, where: str) -> int:
        """Of a tensor outside the arena, how much is worked on at a time; the same on all ranks."""
        # Beside GPUs, whose autograd has threads of its own, ranks do not all see that it is a bucket.
        wide = kind.is_bucket and where == "host" and not self._mixed
        return stages.BUCKET_BYTES if wide else stages.STAGE_BYTES[where]

    def _two_stages(self, where: str, room: int) -> list[Slot]:
        if (where, room) not in self._stages:
            size = room + 64 * self.world_size
            found = self._stages[where, room] = [self.endpoint.arenas[where].allocate(size) for _ in range(2)]
            if where == "host" and torch.cuda.is_available():
                _pin(found)
                self._pinned += found
        return self._stages[where, room]

    def _compiler(self, kind: CollectiveOp, choice: AlgorithmChoice) -> Compiler:
        shares = kind.shares or choice.shares
        key = (kind.collective, choice, shares, kind.root)
        if key not in self._compilers:
            self._compilers[key] = Compiler(self._schedule(kind, choice, shares), self.rank)
        return self._compilers[key]

    def _schedule(self, kind: CollectiveOp, choice: AlgorithmChoice, shares: Shares | None) -> Schedule:
        """Fitted to the network where that is described and parts may lie anywhere; otherwise as it comes."""
        if self.forecast and kind.collective is Collective.ALL_REDUCE and not kind.shares:
            return self.forecast.schedule(choice, kind.collective)
        request = Request(kind.collective, self.world_size, shares=shares, segments=choice.segments, root=kind.root)
        schedule = build(choice.algorithm, request)
        halves = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
        if kind.collective in halves and schedule.owners != tuple(range(self.world_size)):
            raise UnsuitedError(f"{choice} does not leave each rank one part in the order of ranks; use gdraa or ring")
        return schedule

    def _common_windows(self) -> list[str]:
        """The kinds of windows over which all members reach one another."""
        places = [self.endpoint.places[rank] for rank in self.members]
        common = set(self.endpoint.kinds).intersection(*(place.windows for place in places))
        near = {"host", "cuda"} if len({place.host for place in places}) == 1 else {"far"}
        return sorted(common & near, reverse=True)

    def _executor(self, kind: str) -> OneSidedExecutor:
        ranks = self.members
        windows = [None if rank == self.endpoint.rank else self.endpoint.window(kind, rank) for rank in ranks]
        arena, control = self.endpoint.arenas[kind], self.endpoint.control
        if kind == "far":
            far = cast("list[RemoteWindow | None]", windows)
            return RemoteReadExecutor(arena, far, self.sync, ranks, control, self._timeout_s)
        return OneSidedExecutor(arena, windows, self.sync)

    def _message_executor(self) -> SendRecvExecutor | None:
        if not self.native:
            return None
        return SendRecvExecutor(self.native.backend, self.members, self.endpoint.control, self._timeout_s)

    def _synchronisation(self) -> Sync:
        if "host" in self._common_windows():
            return self._flags()
        return CoordinatorSync(self.name, self.members, self.endpoint.control, self._timeout_s)

    def _flags(self) -> FlagSync:
        page = self.endpoint.arenas["host"].allocate(PAGE_BYTES)
        page.bytes.zero_()
        store = self.endpoint.store
        store.set(f"mimatrix/group/{self.name}/{self.rank}", str(page.offset))
        pages = []
        for index, rank in enumerate(self.members):
            offset = int(store.get(f"mimatrix/group/{self.name}/{index}"))
            here = (
                page.bytes
                if index == self.rank
                else self.endpoint.window("host", rank).view(offset, offset + PAGE_BYTES)
            )
            assert here is not None
            pages.append(here.numpy().data.cast("B"))
        return FlagSync(self.rank, pages, self.members, self.endpoint.control, self._timeout_s)


def _pin(slots: Sequence[Slot]) -> None:
    """Let a GPU copy to and from them at full speed; without it the copies are only slower."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for slot in slots:
        runtime.cudaHostRegister(slot.bytes.data_ptr(), slot.size, 0)


def _unpin(slots: Sequence[Slot]) -> None:
    """Undo it before others get the slots: what is pinned twice fails, and not where it happens."""
    for slot in slots:
        torch.cuda.cudart().cudaHostUnregister(slot.bytes.data_ptr())  # type: ignore[no-untyped-call]


def on_own_stream(task: Task, tensor: torch.Tensor) -> Task:
    """On a GPU, run after what the caller has launched so far, beside what it launches next.

    On the caller's own thread there is nothing beside: the task then runs on the caller's stream.
    """
    if not tensor.is_cuda:
        return task
    caller = threading.get_ident()
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record(torch.cuda.current_stream(tensor.device))

    def run() -> None:
        if threading.get_ident() == caller:
            task()
            return
        stream = _own_stream(tensor.device)
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            task()
            stream.synchronize()

    return run


@lru_cache
def _own_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _return(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Put a result back where `reshape` had to copy."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))
